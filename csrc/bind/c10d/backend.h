// torch.distributed's backend over any engine, which it uses through the Engine interface only. Tensors on the cpu use
// an engine that every group has; tensors on a device use an engine that is made at the first call there (device.h).
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "bind/c10d/batch.h"
#include "bind/c10d/device.h"
#include "bind/c10d/task.h"
#include "bind/c10d/work.h"

namespace ringcomm {

using c10::intrusive_ptr;

// A synchronous call (asyncOp = false) runs in the caller's thread, or on its stream, and returns null, which
// torch.distributed understands as "already done". An asynchronous one, and every send and receive, returns an
// AsyncWork or a DeviceWork.
class Backend final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds limit) : c10d::Backend::Options("ringcomm", limit) {}
  };

  // `factory` makes the device's engine; with `host_memory` that engine serves cpu tensors in place of `engine`.
  Backend(std::shared_ptr<Engine> engine, intrusive_ptr<Options> options, DeviceGroup::EngineFactory factory,
          bool host_memory);
  ~Backend() override;

  const std::string getBackendName() const override { return "ringcomm"; }
  intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return true; }
  // On the cpu batch_isend_irecv needs no batch, during which torch would hold back calls of other threads, too.
  bool supportsCoalescing() const override { return devices_.possible(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  intrusive_ptr<c10d::Backend> split(const intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                     const intrusive_ptr<c10d::Backend::Options>& opts) override;

  // The members of a group are fixed; a new group's members meet through the store again. So supportsShrinking and
  // supportsReconfigure (torch 2.14) stay false, and the errors of these calls say what to do.
  intrusive_ptr<c10d::Backend> shrink(const std::vector<std::int64_t>& excluded, int flags,
                                      const intrusive_ptr<c10d::Backend::Options>& opts) override;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  c10d::ReconfigureHandle get_reconfigure_handle() const override { refuse_other_members("get_reconfigure_handle"); }
  WorkPtr reconfigure(const c10d::ReconfigureOptions& /* opts */) override { refuse_other_members("reconfigure"); }
#endif

  // Connects at init_process_group(device_id=...), instead of at the first call on the device.
  void eagerConnectSingleDevice(at::Device device) override;

  // Memory that the peers read and write in place. On a device this would be a collective call, and torch does not
  // promise to make it on every rank.
  bool supportsTensorAlloc(c10::DeviceIndex index) override { return index < 0; }  // only the cpu has no index
  Tensor allocateTensor(long count, at::TensorOptions options) override;

  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setSequenceNumberForGroup() override { sequence_ = messages_ = 0; }
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<std::int64_t>& output_rows,
                        std::vector<std::int64_t>& input_rows, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

 private:
  Site site(const char* title) { return {title, rank_, size_, &devices_, &batches_}; }
  [[noreturn]] void refuse_other_members(const char* call) const;
  bool deferred(bool async) { return async || batches_.find(); }
  // Runs or submits prepared calls. A profiler records `inputs`; `outputs` become the Work's result and its future's
  // value.
  WorkPtr launch(c10d::OpType type, Task&& task, bool async, at::TensorList inputs, at::TensorList outputs);
  WorkPtr launch(c10d::OpType type, std::vector<Task>&& tasks, bool async, at::TensorList inputs,
                 at::TensorList outputs);
  WorkPtr run_or_submit(c10d::OpType type, Task&& task, bool async, at::TensorList inputs, at::TensorList outputs);
  WorkPtr run_or_submit(c10d::OpType type, std::vector<Task>&& tasks, bool async, at::TensorList inputs,
                        at::TensorList outputs);
  template <typename Body>
  WorkPtr with_comms_event(c10d::OpType type, const Call& call, bool async, at::TensorList inputs,
                           at::TensorList outputs, const Body& body);
  intrusive_ptr<AsyncWork> begin(c10d::OpType type, const Site& site, at::TensorList inputs);
  WorkPtr submit(c10d::OpType type, std::span<Task> tasks, at::TensorList inputs, at::TensorList outputs);
  void run(Task& task);
  Task allreduce_task(const Site& site, const Tensor& tensor, const c10d::AllreduceOptions& opts);
  Task allgather_task(const Site& site, Tensor& output, const Tensor& input, bool async,
                      std::chrono::milliseconds timeout);
  Task allgather_task(const Site& site, const Tensors& outputs, const Tensor& input, bool async,
                      std::chrono::milliseconds timeout);
  Task reduce_scatter_task(const Site& site, Tensor& output, const Tensor& input,
                           const c10d::ReduceScatterOptions& opts, bool async);
  // Waits for the other ranks, even if the call is asynchronous.
  WorkPtr all_reduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts);
  Tensor gather_indices(const Site& at, const Tensor& mine, std::chrono::milliseconds timeout);
  WorkPtr receive(Tensors& tensors, const Site& site, c10d::OpType type, int peer, int tag);
  std::uint64_t global_rank(int rank) const;
  std::vector<int> missing_at_barrier(std::chrono::milliseconds limit, bool all);

  std::shared_ptr<Engine> engine_;  // of the cpu
  intrusive_ptr<Options> options_;
  DeviceGroup devices_;
  std::atomic<std::uint64_t> sequence_{0}, messages_{0};  // collectives, and sends and receives
  Batches batches_;
  // The last child and its key: torch splits once for each device type, but one child serves all of them.
  std::string split_key_;
  c10::weak_intrusive_ptr<c10d::Backend> split_child_;
};

}  // namespace ringcomm
