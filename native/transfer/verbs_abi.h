// The part of libibverbs' binary interface used here, so that the build needs no rdma-core package.
//
// Written after rdma-core's public <infiniband/verbs.h> (v44; unchanged in these parts since v1.1). Structures that the
// library hands out are declared as far as they are read; those that it reads or fills are declared whole. Where the
// original is installed, tests/abi_test.cpp compares every offset used. Members keep the names they have there.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace baton::transfer::ibv {

inline constexpr int kNameBytes = 64, kPathBytes = 256;

enum PortState : int { kPortActive = 4 };
enum LinkLayer : std::uint8_t { kLinkUnspecified, kLinkInfiniband, kLinkEthernet };
enum GidType : std::uint32_t { kGidIb, kGidRoceV1, kGidRoceV2 };
enum QpType : int { kQpReliable = 2 };
enum QpState : int { kQpReset, kQpInit, kQpReadyToReceive, kQpReadyToSend, kQpError = 6 };
enum Access : int { kLocalWrite = 1, kRemoteWrite = 2, kRemoteRead = 4 };
enum Opcode : int { kRdmaRead = 4 };
enum SendFlags : unsigned { kSignaled = 2 };
enum Status : int { kSuccess = 0, kLocalProtection = 4, kFlushed = 5, kRemoteAccess = 10, kRetriesExceeded = 12 };
enum QpMask : int {
  kSetState = 1 << 0,
  kSetAccess = 1 << 3,
  kSetPkey = 1 << 4,
  kSetPort = 1 << 5,
  kSetAddress = 1 << 7,
  kSetMtu = 1 << 8,
  kSetTimeout = 1 << 9,
  kSetRetries = 1 << 10,
  kSetReceiverRetries = 1 << 11,
  kSetReceiverPsn = 1 << 12,
  kSetReads = 1 << 13,
  kSetReceiverTimer = 1 << 15,
  kSetPsn = 1 << 16,
  kSetReadsServed = 1 << 17,
  kSetDestination = 1 << 20,
};

struct Context;
struct Cq;
struct Qp;

struct Device {
  void* ops[2];
  int node_type;
  int transport_type;
  char name[kNameBytes];
  char dev_name[kNameBytes];
  char dev_path[kPathBytes];
  char ibdev_path[kPathBytes];
};

struct Pd {
  Context* context;
  std::uint32_t handle;
};

struct Mr {
  Context* context;
  Pd* pd;
  void* addr;
  std::size_t length;
  std::uint32_t handle;
  std::uint32_t lkey;
  std::uint32_t rkey;
};

struct CompChannel {
  Context* context;
  int fd;
  int refcnt;
};

struct Gid {
  alignas(8) std::uint8_t raw[16];
};

struct GidEntry {
  Gid gid;
  std::uint32_t gid_index;
  std::uint32_t port_num;
  std::uint32_t gid_type;
  std::uint32_t ndev_ifindex;
};

struct DeviceAttr {
  char fw_ver[64];
  std::uint64_t node_guid;
  std::uint64_t sys_image_guid;
  std::uint64_t max_mr_size;
  std::uint64_t page_size_cap;
  std::uint32_t vendor_id;
  std::uint32_t vendor_part_id;
  std::uint32_t hw_ver;
  int max_qp;
  int max_qp_wr;
  unsigned device_cap_flags;
  int max_sge;
  int max_sge_rd;
  int max_cq;
  int max_cqe;
  int max_mr;
  int max_pd;
  int max_qp_rd_atom;
  int max_ee_rd_atom;
  int max_res_rd_atom;
  int max_qp_init_rd_atom;
  int not_used[16];  // The fields max_ee_init_rd_atom to max_srq_sge.
  std::uint16_t max_pkeys;
  std::uint8_t local_ca_ack_delay;
  std::uint8_t phys_port_cnt;
};

// The exported `ibv_query_port` fills all members but the last.
struct PortAttr {
  int state;
  int max_mtu;
  int active_mtu;
  int gid_tbl_len;
  std::uint32_t port_cap_flags;
  std::uint32_t max_msg_sz;
  std::uint32_t bad_pkey_cntr;
  std::uint32_t qkey_viol_cntr;
  std::uint16_t pkey_tbl_len;
  std::uint16_t lid;
  std::uint16_t sm_lid;
  std::uint8_t lmc;
  std::uint8_t max_vl_num;
  std::uint8_t sm_sl;
  std::uint8_t subnet_timeout;
  std::uint8_t init_type_reply;
  std::uint8_t active_width;
  std::uint8_t active_speed;
  std::uint8_t phys_state;
  std::uint8_t link_layer;
  std::uint8_t flags;
  std::uint16_t port_cap_flags2;
};

struct QpCap {
  std::uint32_t max_send_wr;
  std::uint32_t max_recv_wr;
  std::uint32_t max_send_sge;
  std::uint32_t max_recv_sge;
  std::uint32_t max_inline_data;
};

struct QpInitAttr {
  void* qp_context;
  Cq* send_cq;
  Cq* recv_cq;
  void* srq;
  QpCap cap;
  int qp_type;
  int sq_sig_all;
};

struct GlobalRoute {
  Gid dgid;
  std::uint32_t flow_label;
  std::uint8_t sgid_index;
  std::uint8_t hop_limit;
  std::uint8_t traffic_class;
};

struct AhAttr {
  GlobalRoute grh;
  std::uint16_t dlid;
  std::uint8_t sl;
  std::uint8_t src_path_bits;
  std::uint8_t static_rate;
  std::uint8_t is_global;
  std::uint8_t port_num;
};

struct QpAttr {
  int qp_state;
  int cur_qp_state;
  int path_mtu;
  int path_mig_state;
  std::uint32_t qkey;
  std::uint32_t rq_psn;
  std::uint32_t sq_psn;
  std::uint32_t dest_qp_num;
  unsigned qp_access_flags;
  QpCap cap;
  AhAttr ah_attr;
  AhAttr alt_ah_attr;
  std::uint16_t pkey_index;
  std::uint16_t alt_pkey_index;
  std::uint8_t en_sqd_async_notify;
  std::uint8_t sq_draining;
  std::uint8_t max_rd_atomic;
  std::uint8_t max_dest_rd_atomic;
  std::uint8_t min_rnr_timer;
  std::uint8_t port_num;
  std::uint8_t timeout;
  std::uint8_t retry_cnt;
  std::uint8_t rnr_retry;
  std::uint8_t alt_port_num;
  std::uint8_t alt_timeout;
  std::uint32_t rate_limit;
};

struct Sge {
  std::uint64_t addr;
  std::uint32_t length;
  std::uint32_t lkey;
};

struct SendWr {
  std::uint64_t wr_id;
  SendWr* next;
  Sge* sg_list;
  int num_sge;
  int opcode;
  unsigned send_flags;
  std::uint32_t imm_data;
  struct {
    std::uint64_t remote_addr;
    std::uint32_t rkey;
    alignas(8) std::uint8_t rest[16];  // The union's other members are larger.
  } rdma;
  std::uint32_t remote_srqn;
  alignas(8) std::uint8_t rest[48];  // Fields of memory windows and segmentation.
};

struct Wc {
  std::uint64_t wr_id;
  int status;
  int opcode;
  std::uint32_t vendor_err;
  std::uint32_t byte_len;
  std::uint32_t imm_data;
  std::uint32_t qp_num;
  std::uint32_t src_qp;
  unsigned wc_flags;
  std::uint16_t pkey_index;
  std::uint16_t slid;
  std::uint8_t sl;
  std::uint8_t dlid_path_bits;
};

struct Qp {
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq* send_cq;
  Cq* recv_cq;
  void* srq;
  std::uint32_t handle;
  std::uint32_t qp_num;
  int state;
  int qp_type;
};

struct Cq {
  Context* context;
  CompChannel* channel;
  void* cq_context;
  std::uint32_t handle;
  int cqe;
};

// The calls on the fast path are not exported: they go through this table of the open device.
struct ContextOps {
  void* compat_0[11];
  int (*poll_cq)(Cq* cq, int entries, Wc* wc);
  int (*req_notify_cq)(Cq* cq, int solicited_only);
  void* compat_13[7];
  void* post_srq_recv;
  void* compat_21[4];
  int (*post_send)(Qp* qp, SendWr* wr, SendWr** bad_wr);
  int (*post_recv)(Qp* qp, void* wr, void** bad_wr);
  void* compat_27[5];
};

struct Context {
  Device* device;
  ContextOps ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

// The exported calls, under their names without "ibv_".
struct Calls {
  Device** (*get_device_list)(int* count);
  void (*free_device_list)(Device** list);
  Context* (*open_device)(Device* device);
  int (*close_device)(Context* context);
  int (*query_device)(Context* context, DeviceAttr* attr);
  int (*query_port)(Context* context, std::uint8_t port, PortAttr* attr);
  int (*query_gid)(Context* context, std::uint8_t port, int index, Gid* gid);
  int (*query_gid_ex)(Context* context, std::uint32_t port, std::uint32_t index, GidEntry* entry, std::uint32_t flags,
                      std::size_t entry_bytes);  // "_ibv_query_gid_ex"; null before v34 of rdma-core.
  Pd* (*alloc_pd)(Context* context);
  int (*dealloc_pd)(Pd* pd);
  Mr* (*reg_mr)(Pd* pd, void* address, std::size_t bytes, int access);
  Mr* (*reg_dmabuf_mr)(Pd* pd, std::uint64_t offset, std::size_t bytes, std::uint64_t address, int fd,
                       int access);  // Null before v34 of rdma-core.
  int (*dereg_mr)(Mr* mr);
  CompChannel* (*create_comp_channel)(Context* context);
  int (*destroy_comp_channel)(CompChannel* channel);
  Cq* (*create_cq)(Context* context, int entries, void* cq_context, CompChannel* channel, int vector);
  int (*destroy_cq)(Cq* cq);
  int (*get_cq_event)(CompChannel* channel, Cq** cq, void** cq_context);
  void (*ack_cq_events)(Cq* cq, unsigned events);
  Qp* (*create_qp)(Pd* pd, QpInitAttr* attr);
  int (*modify_qp)(Qp* qp, QpAttr* attr, int mask);
  int (*destroy_qp)(Qp* qp);
  const char* (*wc_status_str)(int status);
  int (*fork_init)();
};

}  // namespace baton::transfer::ibv
