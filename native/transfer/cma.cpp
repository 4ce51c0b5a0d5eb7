// One-sided, where the kernel lets the sink read the source's memory ("cross-memory attach"): any pool will do.
//
// Linux allows it between processes of one user, unless Yama asks the source to agree (ptrace_scope 1, the default of
// Debian and Ubuntu), which it does here, for every process of that user; or unless they do not see each other's
// process ids, as in containers. The sink tries, and proves it by a token that it read.
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "hash/crc32c.h"
#include "transfer/one_sided.h"
#include "transfer/wire.h"

namespace baton::transfer {
namespace {

constexpr std::size_t kPiecesPerCall = 1024;  // IOV_MAX

bool read_remote(int pid, std::span<const iovec> local, std::span<const iovec> remote) {
  while (!local.empty()) {
    const std::size_t count = std::min(local.size(), kPiecesPerCall);
    std::size_t expected = 0;
    for (const iovec& piece : local.first(count)) expected += piece.iov_len;
    const ssize_t taken = ::process_vm_readv(pid, local.data(), count, remote.data(), count, 0);
    // It stops early only at memory that cannot be read.
    if (taken != static_cast<ssize_t>(expected)) return false;
    local = local.subspan(count);
    remote = remote.subspan(count);
  }
  return true;
}

class CmaSource : public OneSidedSource {
 public:
  using OneSidedSource::OneSidedSource;

  Blob offer() const override {
    Blob blob;
    Writer writer(blob);
    writer.put(static_cast<std::int32_t>(::getpid()));
    writer.put(reinterpret_cast<std::uint64_t>(token_.data()));
    RemotePool::of(site_.pool).put(writer);
    return blob;
  }
  bool check(const Blob& proof) override { return std::ranges::equal(proof, token_); }

 private:
  Token token_ = make_token();
};

class CmaSink : public OneSidedSink {
 public:
  CmaSink(const Site& site, RemotePool remote, int pid, const Token& token)
      : OneSidedSink(site, std::move(remote)), pid_(pid), token_(token) {}
  std::optional<Blob> proof() const override { return Blob(token_.begin(), token_.end()); }

 protected:
  bool read(std::span<const iovec> local, std::span<const iovec> remote, std::uint32_t& crc) override {
    if (!read_remote(pid_, local, remote)) return false;
    for (const iovec& piece : local) crc = checksum_ ? crc32c(crc, piece.iov_base, piece.iov_len) : 0;
    return true;
  }

 private:
  int pid_;
  Token token_;
};

// Yama lets a process be read by its ancestors only, unless it names who else may.
void permit_reading() {
  int scope = 0;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  if (scope == 1) ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

std::unique_ptr<DataPath> at_source(const Site& site, std::string&) {
  permit_reading();
  return std::make_unique<CmaSource>(site);
}

std::unique_ptr<DataPath> at_sink(const Site& site, const Blob& offer, std::string& why) {
  std::int32_t pid = 0;
  std::uint64_t token_address = 0;
  Reader reader(offer);
  reader.get(pid);
  reader.get(token_address);
  auto remote = RemotePool::get(reader, site.pool);
  if (!remote || !reader.finished()) {
    why = "the source's offer makes no sense";
    return nullptr;
  }
  Token token{};
  const iovec local{token.data(), token.size()}, there{reinterpret_cast<void*>(token_address), token.size()};
  if (read_remote(pid, {&local, 1}, {&there, 1})) {
    return std::make_unique<CmaSink>(site, std::move(*remote), pid, token);
  }
  why = std::string("the source's memory cannot be read: ") + std::strerror(errno);
  return nullptr;
}

}  // namespace

const Backend kCma{.name = "cma", .at_source = &at_source, .at_sink = &at_sink, .local = true};

}  // namespace baton::transfer
