// A shared library that is loaded at run time, so that neither the build nor the start needs it.
#pragma once

#include <string>

namespace baton::transfer {

// Stays loaded until the process ends: libraries of adapters start threads and register handlers.
class Library {
 public:
  explicit Library(const std::string& name);
  // Null if it is absent or cannot be loaded; `why` then gives the reason.
  [[nodiscard]] void* find(const std::string& symbol) const;
  template <class Call>
  [[nodiscard]] bool find(const std::string& symbol, Call*& call) {
    call = reinterpret_cast<Call*>(find(symbol));
    if (call == nullptr && why_.empty()) why_ = "the library has no " + symbol;
    return call != nullptr;
  }
  [[nodiscard]] const std::string& why() const { return why_; }

 private:
  void* handle_;
  std::string why_;
};

}  // namespace baton::transfer
