// A libibverbs.so.1 for hosts without RDMA: reliable connections whose READs and WRITEs the kernel copies between
// processes of this host (process_vm_readv), carried out by a thread that stands for the adapter (verbs_adapter.h).
//
// It is as strict as an adapter: the order and the masks of state changes, packet numbers, keys, bounds, rights,
// protection domains, the sizes of queues, completion events that must be acknowledged; a queue pair that errs flushes
// what it has, and nothing is written once it is destroyed. What a caller would only notice by a hang aborts.
//
// Memory of the stand-in for GPUs (fake_gpu.cpp), which the host cannot touch, is registered by its dma-buf, or as it
// is if a module of the kernel is said to be loaded. What is written there is not seen before that stand-in flushes it.
//
// $FAKE_VERBS_DIR holds a file `control` of 32-bit words that tests may set at any time (see Control), and one table
// for each process, named after its id, that begins with counts of what the process has open (see Table).
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "tests/fabric/verbs_adapter.h"

using namespace baton::tests;
using namespace baton::transfer::ibv;

namespace {

// ---------------------------------------------------------------- calls through the device's table

int post_send(Qp* plain, SendWr* request, SendWr** refused) {
  auto& qp = *static_cast<FakeQp*>(plain);
  const std::lock_guard held(adapter().lock);
  Control& control = *adapter().control;
  for (; request != nullptr; request = request->next) {
    *refused = request;
    if (qp.state != kQpReadyToSend && qp.state != kQpError) return EINVAL;
    if (control.fail_post > 0 && --control.fail_post == 0) return ENOMEM;
    if (qp.used >= qp.cap.max_send_wr || request->num_sge != 1) return ENOMEM;
    if (request->opcode != kRdmaRead && request->opcode != kRdmaWrite) return EINVAL;
    ++qp.used;
    const auto delay = std::chrono::milliseconds(control.delay_ms);
    qp.work.push_back({*request, request->sg_list[0], Clock::now() + delay});
  }
  adapter().changed.notify_all();
  return 0;
}

int poll_cq(Cq* plain, int entries, Wc* wc) {
  auto& cq = *static_cast<FakeCq*>(plain);
  const std::lock_guard held(adapter().lock);
  int count = 0;
  while (count < entries && !cq.completions.empty()) {
    const Completion& completion = cq.completions.front();
    completion.qp->used -= completion.retires;
    wc[count++] = completion.wc;
    cq.completions.pop_front();
  }
  return count;
}

int req_notify_cq(Cq* plain, int) {
  const std::lock_guard held(adapter().lock);
  static_cast<FakeCq*>(plain)->armed = true;
  return 0;
}

// 0: RoCE v1; 1: v2, link-local; 2: empty; 3: v2, of an IPv4 address. The last four bytes are the process.
bool gid_at(std::uint32_t index, GidEntry& entry) {
  if (index > 3 || index == 2) return false;
  entry = {.gid_index = index, .port_num = 1, .gid_type = index == 0 ? kGidRoceV1 : kGidRoceV2};
  if (index == 3) {
    entry.gid.raw[10] = entry.gid.raw[11] = 0xFF;
  } else {
    entry.gid.raw[0] = 0xFE;
    entry.gid.raw[1] = 0x80;
  }
  const std::int32_t pid = ::getpid();
  std::memcpy(entry.gid.raw + 12, &pid, sizeof pid);
  return true;
}

// A key or number that was not used before, whose remainder is the place of a free slot; 0: none is free.
template <class Slot>
std::uint32_t take_slot(Slot* slots, std::uint32_t count, Word Slot::* taken_by, std::uint32_t mask) {
  static std::atomic<std::uint32_t> next = 1;
  for (std::uint32_t tries = 0; tries < count; ++tries) {
    const std::uint32_t number = next++ & mask;
    if (number != 0 && slots[number % count].*taken_by == 0) return number;
  }
  return 0;
}

// A region of memory that lies `behind` its address, and so many bytes there are mapped for it.
Mr* add_mr(Pd* pd, std::uint64_t address, std::size_t bytes, int access, void* behind, std::uint64_t mapped) {
  const std::lock_guard held(adapter().lock);
  Table& own = *adapter().own;
  const auto key = take_slot(own.mr, kMrs, &SharedMr::key, 0x7FFFFFFF);
  if (key == 0) return errno = ENOMEM, nullptr;
  SharedMr& mr = own.mr[key % kMrs];
  mr.access = access;
  mr.pd = static_cast<FakePd*>(pd)->id;
  mr.begin = address;
  mr.behind = reinterpret_cast<std::uint64_t>(behind);
  mr.mapped = mapped;
  mr.bytes = bytes;
  mr.bytes_for_peers = adapter().control->shrink != 0 ? std::min<std::size_t>(bytes, 64 << 10) : bytes;
  mr.key = static_cast<std::int32_t>(key);
  ++own.mrs;
  return new Mr{.context = pd->context,
                .pd = pd,
                .addr = reinterpret_cast<void*>(address),
                .length = bytes,
                .lkey = key,
                .rkey = key};
}

}  // namespace

// ---------------------------------------------------------------- exported calls

extern "C" {

Device** ibv_get_device_list(int* count) {
  auto** list = static_cast<Device**>(std::calloc(kDevices + 1, sizeof(Device*)));
  *count = kDevices - adapter().control->devices_missing;
  for (int i = 0; i < *count; ++i) list[i] = device(i);
  return list;
}

void ibv_free_device_list(Device** list) {
  std::free(list);
}

Context* ibv_open_device(Device* opened) {
  adapter().open();
  auto* context = new Context{};
  context->device = opened;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  context->ops.post_send = post_send;
  return context;
}

int ibv_close_device(Context* context) {
  delete context;
  adapter().close();
  return 0;
}

int ibv_query_device(Context* context, DeviceAttr* attr) {
  const bool first = number_of(context) == 0;  // The second is a poor one.
  *attr = {.max_qp_wr = first ? 4096 : 8,
           .max_cqe = 1 << 16,
           .max_qp_rd_atom = first ? 16 : 1,
           .max_qp_init_rd_atom = first ? 16 : 1,
           .phys_port_cnt = 1};
  return 0;
}

int ibv_query_port(Context* context, std::uint8_t port, PortAttr* attr) {
  if (port != 1) return EINVAL;
  const Control& control = *adapter().control;
  const bool infiniband = control.infiniband != 0;
  const bool down = (control.ports_down >> number_of(context) & 1) != 0;
  *attr = {.state = down ? 1 : static_cast<int>(kPortActive),
           .max_mtu = 5,
           .active_mtu = number_of(context) == 0 ? 5 : 3,
           .gid_tbl_len = 4,
           .max_msg_sz = 1U << 30,
           .lid = static_cast<std::uint16_t>(infiniband ? ::getpid() : 0),
           .link_layer = infiniband ? kLinkInfiniband : kLinkEthernet};
  return 0;
}

int ibv_query_gid(Context*, std::uint8_t, int index, Gid* gid) {
  GidEntry entry;
  if (!gid_at(static_cast<std::uint32_t>(index), entry)) return -1;
  *gid = entry.gid;
  return 0;
}

int _ibv_query_gid_ex(Context*, std::uint32_t, std::uint32_t index, GidEntry* entry, std::uint32_t, std::size_t) {
  return gid_at(index, *entry) ? 0 : ENODATA;
}

Pd* ibv_alloc_pd(Context* context) {
  static std::atomic<int> ids = 0;
  auto* pd = new FakePd;
  pd->context = context;
  pd->id = ++ids;
  ++adapter().own->pds;
  return pd;
}

int ibv_dealloc_pd(Pd* pd) {
  delete static_cast<FakePd*>(pd);
  --adapter().own->pds;
  return 0;
}

// The adapter keeps to the pages, so they must be there.
Mr* ibv_reg_mr(Pd* pd, void* address, std::size_t bytes, int access) {
  const auto at = reinterpret_cast<std::uint64_t>(address);
  std::uint8_t first = 0;
  const iovec here{&first, 1}, there{address, 1};
  void* behind = ::process_vm_readv(::getpid(), &here, 1, &there, 1, 0) == 1 ? address : nullptr;
  if (behind == nullptr && adapter().control->peer_memory != 0) {
    using Behind = void*(std::uint64_t address, std::uint64_t bytes);
    auto* const find = reinterpret_cast<Behind*>(find_loaded("gpu", "fake_gpu_behind"));
    behind = find == nullptr ? nullptr : find(at, bytes);
  }
  if (behind == nullptr) return errno = EFAULT, nullptr;
  return add_mr(pd, at, bytes, access, behind, 0);
}

Mr* ibv_reg_dmabuf_mr(Pd* pd, std::uint64_t offset, std::size_t bytes, std::uint64_t address, int fd, int access) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (offset % page != address % page) misused("an address is not at its dma-buf's place in a page");
  const std::uint64_t begin = offset / page * page, mapped = offset - begin + bytes;
  void* const at = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(begin));
  if (at == MAP_FAILED) return nullptr;
  return add_mr(pd, address, bytes, access, static_cast<std::uint8_t*>(at) + (offset - begin), mapped);
}

// `written` is told the addresses.
void fake_verbs_flush(void (*written)(std::uint64_t address, std::uint64_t bytes)) {
  adapter().flush_writes(written);
}

int ibv_dereg_mr(Mr* mr) {
  const std::lock_guard held(adapter().lock);
  const SharedMr& region = adapter().own->mr[mr->lkey % kMrs];
  if (region.mapped > 0) {
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    ::munmap(reinterpret_cast<void*>(region.behind / page * page), region.mapped);
  }
  adapter().own->mr[mr->lkey % kMrs].key = 0;
  --adapter().own->mrs;
  delete mr;
  return 0;
}

CompChannel* ibv_create_comp_channel(Context* context) {
  auto* channel = new FakeChannel;
  channel->context = context;
  channel->fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  ++adapter().own->channels;
  return channel;
}

int ibv_destroy_comp_channel(CompChannel* channel) {
  ::close(channel->fd);
  delete static_cast<FakeChannel*>(channel);
  --adapter().own->channels;
  return 0;
}

Cq* ibv_create_cq(Context* context, int entries, void*, CompChannel* channel, int) {
  auto* cq = new FakeCq;
  cq->context = context;
  cq->channel = channel;
  cq->cqe = entries;
  ++adapter().own->cqs;
  return cq;
}

int ibv_destroy_cq(Cq* plain) {
  auto* cq = static_cast<FakeCq*>(plain);
  if (cq->unacknowledged > 0) misused("a completion queue is destroyed with events that were not acknowledged");
  delete cq;
  --adapter().own->cqs;
  return 0;
}

int ibv_get_cq_event(CompChannel* plain, Cq** cq, void**) {
  auto* channel = static_cast<FakeChannel*>(plain);
  std::uint64_t one = 0;
  if (::read(channel->fd, &one, sizeof one) != sizeof one) return -1;
  const std::lock_guard held(adapter().lock);
  *cq = channel->events.front();
  channel->events.pop_front();
  ++static_cast<FakeCq*>(*cq)->unacknowledged;
  return 0;
}

void ibv_ack_cq_events(Cq* cq, unsigned events) {
  const std::lock_guard held(adapter().lock);
  if (static_cast<FakeCq*>(cq)->unacknowledged < events) misused("more events are acknowledged than there were");
  static_cast<FakeCq*>(cq)->unacknowledged -= events;
}

Qp* ibv_create_qp(Pd* pd, QpInitAttr* attr) {
  const std::lock_guard held(adapter().lock);
  Table& own = *adapter().own;
  DeviceAttr limits;
  ibv_query_device(pd->context, &limits);
  const auto number = take_slot(own.qp, kQps, &SharedQp::number, 0xFFFFFF);
  if (number == 0) return errno = ENOMEM, nullptr;
  if (attr->cap.max_send_wr > static_cast<std::uint32_t>(limits.max_qp_wr) || attr->qp_type != kQpReliable) {
    return errno = EINVAL, nullptr;
  }
  auto* qp = new FakeQp;
  qp->context = pd->context;
  qp->pd = pd;
  qp->send_cq = attr->send_cq;
  qp->recv_cq = attr->recv_cq;
  qp->cap = attr->cap;
  qp->qp_num = number;
  qp->state = kQpReset;
  qp->shared = &own.qp[number % kQps];
  qp->shared->state = kQpReset;
  qp->shared->pd = static_cast<FakePd*>(pd)->id;
  qp->shared->number = static_cast<std::int32_t>(number);
  ++own.qps;
  adapter().queues.insert(qp);
  return qp;
}

int ibv_modify_qp(Qp* plain, QpAttr* attr, int mask) {
  auto& qp = *static_cast<FakeQp*>(plain);
  const std::lock_guard held(adapter().lock);
  const auto goes = [&](QpState from, QpState to, int needed) {
    return qp.state == from && attr->qp_state == to && mask == (needed | kSetState);
  };
  if (attr->qp_state == kQpError && mask == kSetState) {
    adapter().fail(qp);
    adapter().flush(qp);
    return 0;
  }
  if (goes(kQpReset, kQpInit, kSetPkey | kSetPort | kSetAccess)) {
    qp.shared->access = static_cast<int>(attr->qp_access_flags);
  } else if (goes(kQpInit, kQpReadyToReceive,
                  kSetAddress | kSetMtu | kSetDestination | kSetReceiverPsn | kSetReadsServed | kSetReceiverTimer)) {
    PortAttr port;
    ibv_query_port(qp.context, attr->ah_attr.port_num, &port);
    const bool global = attr->ah_attr.is_global != 0;
    if (attr->path_mtu > port.active_mtu || attr->path_mtu < 1 || global != (port.link_layer == kLinkEthernet)) {
      return EINVAL;
    }
    std::int32_t pid = 0;
    std::memcpy(&pid, attr->ah_attr.grh.dgid.raw + 12, sizeof pid);
    qp.peer_pid = global ? pid : adapter().pid_of(attr->ah_attr.dlid);
    qp.shared->peer = attr->dest_qp_num;
    qp.shared->first_packet_in = attr->rq_psn;
    if (qp.cap.max_send_wr > 1) adapter().own->sink_gid = attr->ah_attr.grh.sgid_index;
  } else if (goes(kQpReadyToReceive, kQpReadyToSend,
                  kSetTimeout | kSetRetries | kSetReceiverRetries | kSetPsn | kSetReads)) {
    DeviceAttr limits;
    ibv_query_device(qp.context, &limits);
    if (attr->max_rd_atomic > limits.max_qp_init_rd_atom) return EINVAL;
    qp.first_packet_out = attr->sq_psn;
    qp.reads_max = attr->max_rd_atomic;
  } else {
    return EINVAL;
  }
  qp.state = attr->qp_state;
  qp.shared->state = attr->qp_state;
  return 0;
}

int ibv_destroy_qp(Qp* plain) {
  auto* qp = static_cast<FakeQp*>(plain);
  const std::lock_guard held(adapter().lock);
  adapter().queues.erase(qp);
  std::erase_if(static_cast<FakeCq*>(qp->send_cq)->completions, [&](const Completion& c) { return c.qp == qp; });
  qp->shared->number = 0;
  --adapter().own->qps;
  delete qp;
  return 0;
}

const char* ibv_wc_status_str(int status) {
  switch (status) {
    case kSuccess:
      return "success";
    case kLocalProtection:
      return "local protection error";
    case kFlushed:
      return "Work Request Flushed Error";
    case kRemoteAccess:
      return "remote access error";
    case kRetriesExceeded:
      return "transport retry counter exceeded";
    default:
      return "remote operation error";
  }
}

int ibv_fork_init() {
  return 0;
}

}  // extern "C"
