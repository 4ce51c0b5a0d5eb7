// The transfer agent: the core, and one thread that carries out what it decides.
//
// Commands may come from any thread: each is one step of the core under a lock that is never held over I/O, so it
// returns at once and a revocation is in force when it returns. Actions go through one queue, in the order the core
// decided them, to the progress thread, which sleeps in epoll while there is nothing to do.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "transfer/converter.h"
#include "transfer/core.h"
#include "transfer/data_path.h"
#include "transfer/endpoint.h"
#include "transfer/tcp.h"

namespace baton::transfer {

class Agent {
 public:
  // Throws std::invalid_argument (host, port, backends) or std::system_error.
  // `listen`: one rail or several, "host:port[@label][~distance]"; port 0: any that is free.
  Agent(Options options, const std::vector<std::string>& listen);
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  [[nodiscard]] const std::string& endpoint() const { return endpoint_; }
  // Readable while `poll` has something to return; stays open until the agent is destroyed.
  [[nodiscard]] int fileno() const { return notify_fd_; }

  void set_pool(Geometry geometry, Pool pool);
  // One command. Throws std::invalid_argument; std::runtime_error once the agent is closed or its thread has failed.
  void command(Event event);
  std::uint64_t open_lease(const Key& key, double unclaimed_ttl_s);
  // `PostReady` of a pool in CUDA memory, in force once what is in the stream now has ended. Throws std::runtime_error.
  void post_ready_after(PostReady command, std::uint64_t stream);
  [[nodiscard]] std::vector<Report> poll();
  [[nodiscard]] Stats stats();
  // Fails pulls, ends leases, stops the thread. Idempotent.
  void close();

 private:
  struct Connection {
    std::unique_ptr<Stream> stream;
    std::unique_ptr<Converter> converter;  // Present on a sink whose blocks differ from the source's.
    std::unique_ptr<DataPath> tried;       // The path tried between offer and agreement.
    const Backend* tried_backend = nullptr;
    double answer_by_s = 0;  // Deadline on a sink whose proof is pending.
    std::unique_ptr<DataPath> path;
    bool connecting = false;
    std::uint32_t watched = 0;
  };

  // A stopped pull whose last writes an adapter still carries out.
  struct Fence {
    PullId pull = 0;
    double until_s = 0;  // Instant at which the writing connections are closed, which ends their writes.
  };

  // epoll tokens of the agent's own descriptors. Every other token is a connection's id, with an extra bit for the
  // descriptor of its data path.
  static constexpr std::uint64_t kListenToken = ~std::uint64_t{0};
  static constexpr std::uint64_t kWakeToken = kListenToken - 1;
  static constexpr std::uint64_t kPathBit = std::uint64_t{1} << 63;
  static constexpr double kAcceptPauseS = 0.1;
  static constexpr const char* kBrokenProtocol = "the peer broke the protocol";

  void listen_on_all(const std::vector<std::string>& listen);
  void close_all();
  bool watch_own(int fd, std::uint64_t token) const;
  static double now_s();
  // Returns the core's time, which does not run while this process stands still.
  double core_time_s_locked();
  void step(std::span<const Event> events);
  void step_locked(std::span<const Event> events);
  void check_usable_locked() const;
  void wake() const;
  void announce() const;

  // Called by the progress thread only.
  void run();
  void run_until_stopped();
  [[nodiscard]] int timeout_ms();
  void carry_out_all();
  void carry_out(Action& action);
  void connect(const Connect& action);
  [[nodiscard]] Site site(ConnectionId id, Connection& connection);
  void stage(const Stage& action);
  void offer(const OfferBackend& action);
  void accept_offer(const AcceptBackend& action);
  void answer(ConnectionId id, Connection& connection);
  void check(const CheckBackend& action);
  void use(const UseBackend& action);
  void watch_path(ConnectionId id, const DataPath& path);
  void stop_placing(PullId pull);
  void lift_fences();
  void end_placing();
  [[nodiscard]] bool advance_all();
  void on_ready(std::uint64_t token, std::uint32_t events);
  void accept_all();
  void accept_all(int listener);
  void pause_accepting();
  void resume_accepting();
  void finish_connect(ConnectionId id, Connection& connection);
  void read(ConnectionId id);
  void flush_all();
  void watch(ConnectionId id, Connection& connection, std::uint32_t events);
  void drop(ConnectionId id, std::string why, bool refused = false);
  [[nodiscard]] Connection* find(ConnectionId id);

  std::uint64_t chunk_bytes_max_ = 0;
  std::string endpoint_;
  std::vector<Rail> rails_;
  std::vector<int> listen_fds_;
  int epoll_fd_ = -1;
  int wake_fd_ = -1;
  int notify_fd_ = -1;

  std::mutex mutex_;  // Guards the members below, up to the blank line.
  Core core_;
  std::vector<Action> actions_;
  std::deque<Report> reports_;
  std::string failure_;
  bool closed_ = false;
  double core_time_s_ = 0;    // The time of the core's last step.
  double stood_still_s_ = 0;  // Total time that the core's time leaves out.
  double put_off_s_ = -1;     // The alarm that was put off last.

  std::mutex closing_;  // Held for the whole of `close`.
  std::atomic<bool> stopping_ = false;
  Pool pool_;                                // Written once, before any chunk can be requested, as are the next two.
  std::optional<layout::Pool> layout_pool_;  // The same with its layout, if it has one.
  Fabrics fabrics_;
  std::unordered_map<ConnectionId, Connection> connections_;
  std::vector<Event> happened_;
  std::vector<ConnectionId> dirty_;    // Have something to send.
  std::vector<ConnectionId> working_;  // May have chunks to copy.
  std::vector<ConnectionId> proving_;  // Some may have answered meanwhile.
  std::vector<Fence> fences_;
  ConnectionId next_accepted_ = 1;
  double accept_again_s_ = 0;  // 0: new connections are accepted.
  std::size_t reports_max_;
  std::thread thread_;
};

}  // namespace baton::transfer
