#include "transfer/library.h"

#include <dlfcn.h>

namespace baton::transfer {

Library::Library(const std::string& name) : handle_(::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ == nullptr) why_ = ::dlerror();
}

void* Library::find(const std::string& symbol) const {
  return handle_ == nullptr ? nullptr : ::dlsym(handle_, symbol.c_str());
}

}  // namespace baton::transfer
