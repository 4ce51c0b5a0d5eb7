// The part of libucp's binary interface used here, so that the build needs no UCX package.
//
// Written after UCX's public <ucp/api/ucp.h>, 1.13 and 1.22. Masks say which members are given, so later versions add
// at the ends and read only what they are told of. Where the original is installed, tests/abi_test.cpp compares every
// offset used. Members keep the names they have there.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>

namespace baton::transfer::ucx {

using Status = std::int8_t;  // A packed enumeration.
inline constexpr Status kOk = 0, kInProgress = 1, kBusy = -15, kLastError = -100;

inline constexpr unsigned kApiMajor = 1, kApiMinor = 13;
inline constexpr unsigned kTransportsMinor = 14;  // First version in which an endpoint reports its transports.

enum ContextMask : std::uint64_t { kSetFeatures = 1 << 0 };
enum Features : std::uint64_t { kRemoteMemory = 1 << 1, kWakeup = 1 << 4 };
enum MemoryMask : std::uint64_t { kSetAddress = 1 << 0, kSetLength = 1 << 1 };
enum EndpointMask : std::uint64_t { kSetRemoteAddress = 1 << 0, kSetErrorMode = 1 << 1, kSetErrorHandler = 1 << 2 };
enum ErrorMode : int { kErrorsUnhandled, kErrorsOfPeer };
enum RequestMask : std::uint32_t {
  kSetCallback = 1 << 1,
  kSetUserData = 1 << 2,
  kSetFlags = 1 << 4,
  kSetMemory = 1 << 8,
};
enum CloseFlags : std::uint32_t { kCloseForce = 1 << 0 };
enum EndpointAttrMask : std::uint64_t { kGetTransports = 1 << 3 };

// Opaque handles.
struct Context;
struct Worker;
struct Endpoint;
struct Memory;
struct RemoteKey;
struct Config;
struct Address;

struct Params {
  std::uint64_t field_mask;
  std::uint64_t features;
  std::size_t request_size;
  void* request_init;
  void* request_cleanup;
  std::uint64_t tag_sender_mask;
  int mt_workers_shared;
  std::size_t estimated_num_eps;
  std::size_t estimated_num_ppn;
  const char* name;
  std::size_t node_local_id;
};

struct WorkerParams {
  std::uint64_t field_mask;
  int thread_mode;
  std::uint64_t cpu_mask[16];
  unsigned events;
  void* user_data;
  int event_fd;
  std::uint64_t flags;
  const char* name;
  std::size_t am_alignment;
  std::uint64_t client_id;
};

struct MemoryParams {
  std::uint64_t field_mask;
  void* address;
  std::size_t length;
  unsigned flags;
  unsigned prot;
  int memory_type;
  const void* exported_memh_buffer;
};

struct SockAddr {
  const sockaddr* addr;
  socklen_t addrlen;
};

struct EndpointParams {
  std::uint64_t field_mask;
  const Address* address;
  int err_mode;
  struct {
    void (*cb)(void* arg, Endpoint* endpoint, Status status);
    void* arg;
  } err_handler;
  void* user_data;
  unsigned flags;
  SockAddr sockaddr;
  void* conn_request;
  const char* name;
  SockAddr local_sockaddr;
};

struct RequestParam {
  std::uint32_t op_attr_mask;
  std::uint32_t flags;
  void* request;
  void (*cb)(void* request, Status status, void* user_data);
  std::uint64_t datatype;
  void* user_data;
  void* reply_buffer;
  int memory_type;
  void* recv_info;
  Memory* memh;
  std::uint64_t remote_datatype;
  const void* remote;
  std::size_t remote_count;
};

struct Transport {
  const char* transport_name;
  const char* device_name;
};

struct EndpointAttr {
  std::uint64_t field_mask;
  char name[32];
  sockaddr_storage local_sockaddr;
  sockaddr_storage remote_sockaddr;
  struct {
    Transport* entries;
    unsigned num_entries;
    std::size_t entry_size;
  } transports;
  void* user_data;
};

// A call returns null (done), a small negative number (an error) or a request.
[[nodiscard]] inline Status status_of(const void* result) {
  const auto value = reinterpret_cast<std::intptr_t>(result);
  return value == 0 ? kOk : value < 0 && value >= kLastError ? static_cast<Status>(value) : kInProgress;
}

// The exported calls, under their names without "ucp_".
struct Calls {
  void (*get_version)(unsigned* major, unsigned* minor, unsigned* release);
  Status (*config_read)(const char* prefix, const char* file, Config** config);
  Status (*config_modify)(Config* config, const char* name, const char* value);
  void (*config_release)(Config* config);
  Status (*init_version)(unsigned major, unsigned minor, const Params* params, const Config* config, Context** context);
  void (*cleanup)(Context* context);
  Status (*mem_map)(Context* context, const MemoryParams* params, Memory** memory);
  Status (*mem_unmap)(Context* context, Memory* memory);
  Status (*rkey_pack)(Context* context, Memory* memory, void** buffer, std::size_t* bytes);
  void (*rkey_buffer_release)(void* buffer);
  Status (*worker_create)(Context* context, const WorkerParams* params, Worker** worker);
  void (*worker_destroy)(Worker* worker);
  Status (*worker_get_address)(Worker* worker, Address** address, std::size_t* bytes);
  void (*worker_release_address)(Worker* worker, Address* address);
  unsigned (*worker_progress)(Worker* worker);
  Status (*worker_get_efd)(Worker* worker, int* fd);
  Status (*worker_arm)(Worker* worker);
  Status (*ep_create)(Worker* worker, const EndpointParams* params, Endpoint** endpoint);
  void* (*ep_close_nbx)(Endpoint* endpoint, const RequestParam* param);
  Status (*ep_query)(Endpoint* endpoint, EndpointAttr* attr);
  Status (*ep_rkey_unpack)(Endpoint* endpoint, const void* buffer, RemoteKey** key);
  void (*rkey_destroy)(RemoteKey* key);
  void* (*get_nbx)(Endpoint* endpoint, void* buffer, std::size_t bytes, std::uint64_t remote, RemoteKey* key,
                   const RequestParam* param);
  Status (*request_check_status)(void* request);
  void (*request_free)(void* request);
  const char* (*status_string)(Status status);  // "ucs_status_string".
};

}  // namespace baton::transfer::ucx
