// Compares our declarations of libraries that are loaded at run time with the originals, where those are installed:
// at compile time, so a difference does not build. For headers elsewhere: CPATH=…/include cmake --build ….
#include <cstddef>

#include "tests/check.h"
#include "transfer/ucx_abi.h"
#include "transfer/verbs_abi.h"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

#define SAME(ours, theirs, member) \
  static_assert(offsetof(baton::transfer::ibv::ours, member) == offsetof(theirs, member))
#define SAME_SIZE(ours, theirs) static_assert(sizeof(baton::transfer::ibv::ours) == sizeof(theirs))
#define EQUAL(ours, theirs) static_assert(static_cast<int>(baton::transfer::ibv::ours) == static_cast<int>(theirs))

SAME_SIZE(Device, ibv_device);
SAME(Device, ibv_device, name);
SAME(Pd, ibv_pd, context);
SAME_SIZE(Mr, ibv_mr);
SAME(Mr, ibv_mr, lkey);
SAME(Mr, ibv_mr, rkey);
SAME_SIZE(CompChannel, ibv_comp_channel);
SAME(CompChannel, ibv_comp_channel, fd);
SAME_SIZE(Gid, ibv_gid);
SAME_SIZE(GidEntry, ibv_gid_entry);
SAME(GidEntry, ibv_gid_entry, gid_type);
SAME_SIZE(DeviceAttr, ibv_device_attr);
SAME(DeviceAttr, ibv_device_attr, max_qp_wr);
SAME(DeviceAttr, ibv_device_attr, max_cqe);
SAME(DeviceAttr, ibv_device_attr, max_qp_rd_atom);
SAME(DeviceAttr, ibv_device_attr, max_qp_init_rd_atom);
SAME(DeviceAttr, ibv_device_attr, phys_port_cnt);
SAME_SIZE(PortAttr, ibv_port_attr);
SAME(PortAttr, ibv_port_attr, gid_tbl_len);
SAME(PortAttr, ibv_port_attr, max_msg_sz);
SAME(PortAttr, ibv_port_attr, lid);
SAME(PortAttr, ibv_port_attr, link_layer);
SAME_SIZE(QpInitAttr, ibv_qp_init_attr);
SAME(QpInitAttr, ibv_qp_init_attr, cap.max_send_sge);
SAME(QpInitAttr, ibv_qp_init_attr, qp_type);
SAME_SIZE(AhAttr, ibv_ah_attr);
SAME(AhAttr, ibv_ah_attr, grh.sgid_index);
SAME(AhAttr, ibv_ah_attr, grh.hop_limit);
SAME(AhAttr, ibv_ah_attr, dlid);
SAME(AhAttr, ibv_ah_attr, is_global);
SAME(AhAttr, ibv_ah_attr, port_num);
SAME_SIZE(QpAttr, ibv_qp_attr);
SAME(QpAttr, ibv_qp_attr, path_mtu);
SAME(QpAttr, ibv_qp_attr, dest_qp_num);
SAME(QpAttr, ibv_qp_attr, qp_access_flags);
SAME(QpAttr, ibv_qp_attr, ah_attr);
SAME(QpAttr, ibv_qp_attr, max_rd_atomic);
SAME(QpAttr, ibv_qp_attr, max_dest_rd_atomic);
SAME(QpAttr, ibv_qp_attr, min_rnr_timer);
SAME(QpAttr, ibv_qp_attr, port_num);
SAME(QpAttr, ibv_qp_attr, timeout);
SAME(QpAttr, ibv_qp_attr, rnr_retry);
SAME_SIZE(Sge, ibv_sge);
SAME(Sge, ibv_sge, lkey);
SAME_SIZE(SendWr, ibv_send_wr);
SAME(SendWr, ibv_send_wr, sg_list);
SAME(SendWr, ibv_send_wr, opcode);
SAME(SendWr, ibv_send_wr, send_flags);
static_assert(offsetof(baton::transfer::ibv::SendWr, rdma.remote_addr) == offsetof(ibv_send_wr, wr.rdma.remote_addr));
static_assert(offsetof(baton::transfer::ibv::SendWr, rdma.rkey) == offsetof(ibv_send_wr, wr.rdma.rkey));
SAME_SIZE(Wc, ibv_wc);
SAME(Wc, ibv_wc, status);
SAME(Wc, ibv_wc, vendor_err);
SAME(Wc, ibv_wc, qp_num);
SAME(Qp, ibv_qp, qp_num);
SAME(Qp, ibv_qp, state);
SAME(Cq, ibv_cq, channel);
SAME_SIZE(Context, ibv_context);
SAME(Context, ibv_context, ops.poll_cq);
SAME(Context, ibv_context, ops.req_notify_cq);
SAME(Context, ibv_context, ops.post_send);
EQUAL(kPortActive, IBV_PORT_ACTIVE);
EQUAL(kLinkInfiniband, IBV_LINK_LAYER_INFINIBAND);
EQUAL(kLinkEthernet, IBV_LINK_LAYER_ETHERNET);
EQUAL(kGidRoceV2, IBV_GID_TYPE_ROCE_V2);
EQUAL(kQpReliable, IBV_QPT_RC);
EQUAL(kQpInit, IBV_QPS_INIT);
EQUAL(kQpReadyToReceive, IBV_QPS_RTR);
EQUAL(kQpReadyToSend, IBV_QPS_RTS);
EQUAL(kQpError, IBV_QPS_ERR);
EQUAL(kLocalWrite, IBV_ACCESS_LOCAL_WRITE);
EQUAL(kRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
EQUAL(kRemoteRead, IBV_ACCESS_REMOTE_READ);
EQUAL(kRdmaRead, IBV_WR_RDMA_READ);
EQUAL(kSignaled, IBV_SEND_SIGNALED);
EQUAL(kLocalProtection, IBV_WC_LOC_PROT_ERR);
EQUAL(kFlushed, IBV_WC_WR_FLUSH_ERR);
EQUAL(kRemoteAccess, IBV_WC_REM_ACCESS_ERR);
EQUAL(kRetriesExceeded, IBV_WC_RETRY_EXC_ERR);
EQUAL(kSetState, IBV_QP_STATE);
EQUAL(kSetAccess, IBV_QP_ACCESS_FLAGS);
EQUAL(kSetPkey, IBV_QP_PKEY_INDEX);
EQUAL(kSetPort, IBV_QP_PORT);
EQUAL(kSetAddress, IBV_QP_AV);
EQUAL(kSetMtu, IBV_QP_PATH_MTU);
EQUAL(kSetTimeout, IBV_QP_TIMEOUT);
EQUAL(kSetRetries, IBV_QP_RETRY_CNT);
EQUAL(kSetReceiverRetries, IBV_QP_RNR_RETRY);
EQUAL(kSetReceiverPsn, IBV_QP_RQ_PSN);
EQUAL(kSetReads, IBV_QP_MAX_QP_RD_ATOMIC);
EQUAL(kSetReceiverTimer, IBV_QP_MIN_RNR_TIMER);
EQUAL(kSetPsn, IBV_QP_SQ_PSN);
EQUAL(kSetReadsServed, IBV_QP_MAX_DEST_RD_ATOMIC);
EQUAL(kSetDestination, IBV_QP_DEST_QPN);
#undef SAME
#undef SAME_SIZE
#undef EQUAL

TEST(verbs_declarations_are_those_of_the_installed_library) {}
#endif

#if __has_include(<ucp/api/ucp.h>)
#include <ucp/api/ucp.h>

#define SAME(ours, theirs, member) \
  static_assert(offsetof(baton::transfer::ucx::ours, member) == offsetof(theirs, member))
#define EQUAL(ours, theirs) static_assert(static_cast<long>(baton::transfer::ucx::ours) == static_cast<long>(theirs))

static_assert(sizeof(baton::transfer::ucx::Status) == sizeof(ucs_status_t));
SAME(Params, ucp_params_t, features);
SAME(Params, ucp_params_t, name);
SAME(WorkerParams, ucp_worker_params_t, thread_mode);
SAME(WorkerParams, ucp_worker_params_t, events);
SAME(WorkerParams, ucp_worker_params_t, client_id);
SAME(MemoryParams, ucp_mem_map_params_t, address);
SAME(MemoryParams, ucp_mem_map_params_t, length);
SAME(MemoryParams, ucp_mem_map_params_t, memory_type);
SAME(EndpointParams, ucp_ep_params_t, address);
SAME(EndpointParams, ucp_ep_params_t, err_mode);
SAME(EndpointParams, ucp_ep_params_t, err_handler);
SAME(EndpointParams, ucp_ep_params_t, local_sockaddr);
SAME(RequestParam, ucp_request_param_t, flags);
SAME(RequestParam, ucp_request_param_t, cb);
SAME(RequestParam, ucp_request_param_t, user_data);
SAME(RequestParam, ucp_request_param_t, memory_type);
SAME(RequestParam, ucp_request_param_t, memh);
EQUAL(kInProgress, UCS_INPROGRESS);
EQUAL(kBusy, UCS_ERR_BUSY);
EQUAL(kLastError, UCS_ERR_LAST);
EQUAL(kSetFeatures, UCP_PARAM_FIELD_FEATURES);
EQUAL(kRemoteMemory, UCP_FEATURE_RMA);
EQUAL(kWakeup, UCP_FEATURE_WAKEUP);
EQUAL(kSetAddress, UCP_MEM_MAP_PARAM_FIELD_ADDRESS);
EQUAL(kSetLength, UCP_MEM_MAP_PARAM_FIELD_LENGTH);
EQUAL(kSetRemoteAddress, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
EQUAL(kSetErrorMode, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
EQUAL(kSetErrorHandler, UCP_EP_PARAM_FIELD_ERR_HANDLER);
EQUAL(kErrorsUnhandled, UCP_ERR_HANDLING_MODE_NONE);
EQUAL(kErrorsOfPeer, UCP_ERR_HANDLING_MODE_PEER);
EQUAL(kSetCallback, UCP_OP_ATTR_FIELD_CALLBACK);
EQUAL(kSetUserData, UCP_OP_ATTR_FIELD_USER_DATA);
EQUAL(kSetFlags, UCP_OP_ATTR_FIELD_FLAGS);
EQUAL(kSetMemory, UCP_OP_ATTR_FIELD_MEMH);
EQUAL(kCloseForce, UCP_EP_CLOSE_FLAG_FORCE);
#if UCP_API_VERSION >= UCP_VERSION(1, 14)
SAME(EndpointAttr, ucp_ep_attr_t, transports.entries);
SAME(EndpointAttr, ucp_ep_attr_t, transports.entry_size);
static_assert(sizeof(baton::transfer::ucx::Transport) == sizeof(ucp_transport_entry_t));
EQUAL(kGetTransports, UCP_EP_ATTR_FIELD_TRANSPORTS);
#endif
#undef SAME
#undef EQUAL

TEST(ucx_declarations_are_those_of_the_installed_library) {}
#endif
