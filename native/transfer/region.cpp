#include "transfer/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace baton::transfer {
namespace {

constexpr std::uint64_t kBytesMax = std::uint64_t{1} << 46;

}  // namespace

bool Region::map(int protection) {
  void* at = ::mmap(nullptr, kHeaderBytes + bytes_, protection, MAP_SHARED, fd_, 0);
  if (at == MAP_FAILED) return false;
  memory_ = static_cast<std::uint8_t*>(at);
  return true;
}

std::shared_ptr<Region> Region::create(std::uint64_t bytes) {
  if (bytes == 0 || bytes > kBytesMax) throw std::invalid_argument("a region has 1 byte to 64 TiB");
  const auto fail = [](const char* what) { throw std::system_error(errno, std::generic_category(), what); };
  const int fd = ::memfd_create("baton-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("cannot make a region");
  std::shared_ptr<Region> region(new Region(fd, bytes));
  // Reserves the memory now: too little memory is an error of this call, not a SIGBUS on a later write.
  if (::posix_fallocate(fd, 0, static_cast<off_t>(kHeaderBytes + bytes)) != 0) {
    throw std::system_error(ENOMEM, std::generic_category(), "no memory for a region of " + std::to_string(bytes));
  }
  if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) fail("cannot seal a region");
  if (!region->map(PROT_READ | PROT_WRITE)) fail("cannot map a region");
  if (::getrandom(region->memory_, kTokenBytes, 0) != static_cast<ssize_t>(kTokenBytes)) fail("no randomness");
  return region;
}

std::shared_ptr<Region> Region::open(int pid, int fd, std::uint64_t bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int own_fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (own_fd < 0) return nullptr;
  std::shared_ptr<Region> region(new Region(own_fd, bytes));
  struct stat status{};
  const int seals = ::fcntl(own_fd, F_GET_SEALS);
  // Whatever was named, it is a region of that size that cannot shrink, or it is not mapped.
  const bool fits = bytes <= kBytesMax && seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ::fstat(own_fd, &status) == 0 &&
                    status.st_size == static_cast<off_t>(kHeaderBytes + bytes);
  if (!fits) errno = EINVAL;
  return fits && region->map(PROT_READ) ? region : nullptr;
}

Region::~Region() {
  if (memory_ != nullptr) ::munmap(memory_, kHeaderBytes + bytes_);
  ::close(fd_);
}

}  // namespace baton::transfer
