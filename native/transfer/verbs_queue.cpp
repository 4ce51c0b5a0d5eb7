#include "transfer/verbs_queue.h"

#include <fcntl.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "transfer/wire.h"

namespace baton::transfer {
namespace {

constexpr std::uint32_t kPacketMask = 0xFFFFFF;
constexpr int kReadsServedMax = 16;
constexpr std::uint8_t kReceiverTimer = 12;  // 0.64 ms; nothing that needs a receive is sent.
constexpr std::uint8_t kTimeout = 14;        // 4.096 µs · 2^14 = 67 ms per try …
constexpr std::uint8_t kRetries = 7;         // … so that a peer that is gone is noticed within seconds.
constexpr std::uint8_t kHopLimit = 64;
constexpr std::chrono::milliseconds kDrain(100);

std::string error_text(const char* what) {
  return std::string(what) + ": " + std::strerror(errno);
}

}  // namespace

void VerbsAddress::put(Writer& writer) const {
  writer.put(queue);
  writer.put(first_packet);
  writer.put(lid);
  writer.put(gid);
  writer.put(link_layer);
  writer.put(mtu);
  writer.put(reads_served);
  writer.put(message_bytes_max);
}

void VerbsAddress::get(Reader& reader) {
  reader.get(queue);
  reader.get(first_packet);
  reader.get(lid);
  reader.get(gid);
  reader.get(link_layer);
  reader.get(mtu);
  reader.get(reads_served);
  reader.get(message_bytes_max);
}

VerbsQueue::VerbsQueue(VerbsDevice& device, std::uint32_t reads) : device_(device) {
  try {
    create(reads);
  } catch (...) {
    destroy();
    throw;
  }
}

VerbsQueue::~VerbsQueue() {
  destroy();
}

void VerbsQueue::create(std::uint32_t reads) {
  const ibv::Calls& calls = device_.calls;
  const ibv::PortAttr port = device_.query();
  const auto limit = [](int most, std::uint32_t wanted) { return std::min(static_cast<std::uint32_t>(most), wanted); };
  const std::uint32_t depth = std::max(1U, limit(std::min(device_.limits.max_qp_wr, device_.limits.max_cqe), reads));
  if (reads > 0) {
    channel_ = calls.create_comp_channel(device_.context);
    if (channel_ == nullptr) throw std::runtime_error(error_text("no completion channel"));
    ::fcntl(channel_->fd, F_SETFL, ::fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
  }
  // Each read may end in a completion of its own: all do when the queue pair fails.
  cq_ = calls.create_cq(device_.context, static_cast<int>(depth), nullptr, channel_, 0);
  if (cq_ == nullptr) throw std::runtime_error(error_text("no completion queue"));
  ibv::QpInitAttr wanted{.send_cq = cq_,
                         .recv_cq = cq_,
                         .cap = {.max_send_wr = depth, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
                         .qp_type = ibv::kQpReliable};
  qp_ = calls.create_qp(device_.pd, &wanted);
  if (qp_ == nullptr) throw std::runtime_error(error_text("no queue pair"));
  room_ = depth;
  modify({.qp_state = ibv::kQpInit, .qp_access_flags = ibv::kRemoteRead, .port_num = device_.port},
         ibv::kSetState | ibv::kSetPkey | ibv::kSetPort | ibv::kSetAccess, "cannot be set up");
  if (channel_ != nullptr && device_.context->ops.req_notify_cq(cq_, 0) != 0) {
    throw std::runtime_error("no notice of completions");
  }
  std::uint32_t random = 0;
  if (::getrandom(&random, sizeof random, 0) != sizeof random) throw std::runtime_error("no randomness");
  address_ = {.queue = qp_->qp_num,
              .first_packet = random & kPacketMask,
              .lid = port.lid,
              .link_layer = port.link_layer,
              .mtu = static_cast<std::uint8_t>(port.active_mtu),
              .reads_served = static_cast<std::uint8_t>(std::clamp(device_.limits.max_qp_rd_atom, 1, kReadsServedMax)),
              .message_bytes_max = port.max_msg_sz};
  const ibv::Gid gid = device_.gid();
  std::copy(std::begin(gid.raw), std::end(gid.raw), address_.gid.begin());
}

void VerbsQueue::modify(ibv::QpAttr attr, int mask, const char* what) {
  // Some versions of the library return the error, some set it.
  const int error = device_.calls.modify_qp(qp_, &attr, mask);
  if (error != 0)
    throw std::runtime_error(std::string("the queue pair ") + what + ": " + std::strerror(std::abs(error)));
}

void VerbsQueue::connect(const VerbsAddress& peer) {
  if (peer.link_layer != address_.link_layer) {
    throw std::runtime_error("one adapter speaks Infiniband, the other Ethernet");
  }
  const bool ethernet = address_.link_layer == ibv::kLinkEthernet;
  ibv::QpAttr receive{.qp_state = ibv::kQpReadyToReceive,
                      .path_mtu = std::min(peer.mtu, address_.mtu),
                      .rq_psn = peer.first_packet,
                      .dest_qp_num = peer.queue,
                      .ah_attr = {.dlid = peer.lid, .is_global = ethernet || peer.lid == 0, .port_num = device_.port},
                      .max_dest_rd_atomic = address_.reads_served,
                      .min_rnr_timer = kReceiverTimer};
  if (receive.ah_attr.is_global != 0) {
    receive.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device_.gid_index);
    receive.ah_attr.grh.hop_limit = kHopLimit;
    std::copy(peer.gid.begin(), peer.gid.end(), receive.ah_attr.grh.dgid.raw);
  }
  modify(receive,
         ibv::kSetState | ibv::kSetAddress | ibv::kSetMtu | ibv::kSetDestination | ibv::kSetReceiverPsn |
             ibv::kSetReadsServed | ibv::kSetReceiverTimer,
         "cannot receive from the peer's");
  const int reads = std::max(1, std::min<int>(device_.limits.max_qp_init_rd_atom, peer.reads_served));
  modify(
      {.qp_state = ibv::kQpReadyToSend,
       .sq_psn = address_.first_packet,
       .max_rd_atomic = static_cast<std::uint8_t>(reads),
       .timeout = kTimeout,
       .retry_cnt = kRetries,
       .rnr_retry = kRetries},
      ibv::kSetState | ibv::kSetTimeout | ibv::kSetRetries | ibv::kSetReceiverRetries | ibv::kSetPsn | ibv::kSetReads,
      "cannot send to the peer's");
}

// Reads of one queue pair end in order, so only the last read of a batch asks for a completion.
bool VerbsQueue::read(std::span<const iovec> local, std::uint32_t lkey, std::span<const iovec> remote,
                      std::uint32_t rkey, void* tag) {
  requests_.assign(local.size(), {});
  targets_.resize(local.size());
  for (std::size_t i = 0; i < local.size(); ++i) {
    const bool last = i + 1 == local.size();
    targets_[i] = {reinterpret_cast<std::uint64_t>(local[i].iov_base), static_cast<std::uint32_t>(local[i].iov_len),
                   lkey};
    requests_[i].wr_id = last ? 1 : 0;
    requests_[i].next = last ? nullptr : &requests_[i + 1];
    requests_[i].sg_list = &targets_[i];
    requests_[i].num_sge = 1;
    requests_[i].opcode = ibv::kRdmaRead;
    requests_[i].send_flags = last ? ibv::kSignaled : 0U;
    requests_[i].rdma.remote_addr = reinterpret_cast<std::uint64_t>(remote[i].iov_base);
    requests_[i].rdma.rkey = rkey;
  }
  ibv::SendWr* refused = nullptr;
  const int error = device_.context->ops.post_send(qp_, requests_.data(), &refused);
  // Reads before the refused one are under way, so only the queue pair's end ends the batch.
  if (error != 0) {
    why_ = std::string("the adapter takes no read: ") + std::strerror(std::abs(error));
    return false;
  }
  room_ -= local.size();
  under_way_.push_back({tag, local.size()});
  return true;
}

bool VerbsQueue::poll(std::vector<Batch>& ended) {
  // The notice is requested before the queue is polled, so that no completion comes unnoticed in between.
  ibv::Cq* cq = nullptr;
  void* context = nullptr;
  unsigned events = 0;
  while (device_.calls.get_cq_event(channel_, &cq, &context) == 0) ++events;
  if (events > 0) {
    device_.calls.ack_cq_events(cq_, events);
    if (device_.context->ops.req_notify_cq(cq_, 0) != 0) {
      why_ = "no notice of completions";
      return false;
    }
  }
  return take_completions(&ended);
}

// A null `ended` counts failed reads as ended, too.
bool VerbsQueue::take_completions(std::vector<Batch>* ended) {
  ibv::Wc done[32];
  while (!under_way_.empty()) {
    const int count = device_.context->ops.poll_cq(cq_, std::size(done), done);
    if (count < 0) why_ = "the adapter lost its completions";
    if (count <= 0) return count == 0;
    for (int i = 0; i < count; ++i) {
      if (ended != nullptr && done[i].status != ibv::kSuccess) {
        why_ = std::string("a read failed: ") + device_.calls.wc_status_str(done[i].status);
        return false;
      }
      if (done[i].wr_id == 0 || under_way_.empty()) continue;
      room_ += under_way_.front().reads;
      if (ended != nullptr) ended->push_back(under_way_.front());
      under_way_.pop_front();
    }
  }
  return true;
}

void VerbsQueue::destroy() {
  const ibv::Calls& calls = device_.calls;
  if (qp_ != nullptr) {
    ibv::QpAttr error{.qp_state = ibv::kQpError};
    const bool drains = calls.modify_qp(qp_, &error, ibv::kSetState) == 0;
    // Takes microseconds; should an adapter take longer, its destruction still waits for it.
    const auto until = std::chrono::steady_clock::now() + kDrain;
    while (drains && !under_way_.empty() && std::chrono::steady_clock::now() < until) {
      if (!take_completions(nullptr)) break;
    }
    calls.destroy_qp(qp_);
  }
  if (cq_ != nullptr) calls.destroy_cq(cq_);
  if (channel_ != nullptr) calls.destroy_comp_channel(channel_);
}

}  // namespace baton::transfer
