#include "bind/c10d/backend.h"

#include <numeric>
#include <tuple>

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

namespace ringcomm {
namespace {

using c10d::OpType;

const Tensor& only(const Site& site, const Tensors& tensors) {
  if (C10_UNLIKELY(tensors.size() != 1)) {
    site.refuse("InvalidArgumentError", "got ", tensors.size(),
                " tensors, expected one, because a rank has one device; call once for each tensor");
  }
  return tensors[0];
}

const Tensors& one_for_each_rank(const Site& site, const Tensors& tensors, const char* side) {
  if (tensors.size() != static_cast<std::size_t>(site.world_size)) {
    site.refuse("ShapeError", "got ", tensors.size(), " ", side, " tensors, expected ", site.world_size,
                "; pass a list with one tensor for each rank");
  }
  return tensors;
}

// Returns the parts for each rank on one side of a call; torch wraps them in a list with one entry for each device.
const Tensors& parts_of(const Site& site, const std::vector<Tensors>& lists, const char* side) {
  if (lists.size() != 1) {
    site.refuse("InvalidArgumentError", "got ", lists.size(), " lists of ", side,
                " tensors, expected one, because a rank has one device; call once for each list");
  }
  return one_for_each_rank(site, lists[0], side);
}

void same_count(const Site& site, const char* what, std::int64_t expected, std::int64_t got) {
  if (C10_LIKELY(expected == got)) return;
  site.refuse("ShapeError", "expected ", expected, " elements in ", what, ", got ", got, "; resize one of the tensors");
}

void no_parts_elsewhere(const Site& site, const std::vector<Tensors>& lists, const char* side, std::int64_t root) {
  if (lists.empty() || (lists.size() == 1 && lists[0].empty())) return;
  site.refuse("InvalidArgumentError", "got a list of ", side, " tensors, expected none, because rank ", root,
              " is the root; leave the list out on other ranks");
}

void same_length(const Site& site, std::size_t outputs, std::size_t inputs) {
  if (outputs == inputs && outputs != 0) return;
  site.refuse("InvalidArgumentError", "got ", outputs, " outputs and ", inputs,
              " inputs, expected as many of one as of the other and at least one; pass a pair for each call");
}

// ProcessGroupNCCL's names in `record_param_comms`, which tools that read profiles know.
const char* nccl_name(OpType type, const Call& call) {
  switch (type) {
    case OpType::BROADCAST:
      return "broadcast";
    case OpType::ALLREDUCE:
      return "allreduce";
    case OpType::ALLREDUCE_COALESCED:
      return "allreduce_coalesced";
    case OpType::REDUCE:
      return "reduce";
    case OpType::ALLGATHER:
      return "all_gather";
    case OpType::_ALLGATHER_BASE:
      return "_allgather_base";
    case OpType::ALLGATHER_COALESCED:
      return "allgather_coalesced";
    case OpType::GATHER:
      return "gather";
    case OpType::SCATTER:
      return "scatter";
    case OpType::REDUCE_SCATTER:
      return "reduce_scatter";
    case OpType::_REDUCE_SCATTER_BASE:
      return "_reduce_scatter_base";
    case OpType::ALLTOALL_BASE:
      return call.input_parts.empty() ? "all_to_all" : "all_to_allv";
    case OpType::ALLTOALL:
      return "all_to_all";
    case OpType::SEND:
      return "send";
    case OpType::RECV:
    case OpType::RECVANYSOURCE:
      return "recv";
    case OpType::BARRIER:
      return "barrier";
    default:  // lists of tensors
      return call.op == Op::kAllGather ? "allgather_into_tensor_coalesced" : "reduce_scatter_tensor_coalesced";
  }
}

std::int64_t elements(at::TensorList tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), std::int64_t{0},
                         [](std::int64_t sum, const Tensor& tensor) { return sum + tensor.numel(); });
}

// The sizes that a rank sends to, or receives from, each rank: rows of an uneven all_to_all_single, or elements of the
// tensors of a list.
std::vector<std::int64_t> split_sizes(OpType type, const std::vector<Part>& parts, at::TensorList tensors) {
  if (type != OpType::ALLTOALL && type != OpType::ALLTOALL_BASE) return {};
  std::size_t width = 1;  // elements of a row
  if (type == OpType::ALLTOALL_BASE)
    for (const std::int64_t size : tensors.front().sizes().slice(tensors.front().dim() == 0 ? 0 : 1)) width *= size;
  std::vector<std::int64_t> sizes;
  for (const Part& part : parts) sizes.push_back(width == 0 ? 0 : static_cast<std::int64_t>(part.count / width));
  return sizes;
}

}  // namespace

// -- running ---------------------------------------------------------------------------------------------------------

void Backend::run(Task& task) {
  engine_->run(task.call);
  if (C10_UNLIKELY(!task.pairs.empty())) write_back(task.pairs);
}

intrusive_ptr<AsyncWork> Backend::begin(OpType type, const Site& site, at::TensorList inputs) {
  const bool profiling = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value();
  const auto work = [&](OpType of, const char* title) {
    if (C10_LIKELY(!profiling)) return c10::make_intrusive<AsyncWork>(rank_, of, sequence_.load());
    return c10::make_intrusive<AsyncWork>(rank_, of, sequence_.load(), title, inputs.vec());
  };
  Batch* const batch = batches_.find();
  if (!batch) return work(type, site.title);
  if (!batch->on_cpu) batch->on_cpu = work(OpType::COALESCED, "ringcomm:coalesced");
  return batch->on_cpu;
}

// Submits calls on the cpu; returns null if they join a batch.
WorkPtr Backend::submit(OpType type, std::span<Task> tasks, at::TensorList inputs, at::TensorList outputs) {
  try {
    auto work = begin(type, tasks.front().site(), inputs);
    for (Task& task : tasks) work->add(*engine_, std::move(task), &task == &tasks.front() ? outputs : at::TensorList());
    if (batches_.find()) return nullptr;
    work->finish_adding();
    return work;
  } catch (...) {
    batches_.abandon();
    throw;
  }
}

void abandon_batch(Batches& batches) { batches.abandon(); }

// Counts the call, in the sequence of the collectives or of the messages, and runs `body`; under a profiler within the
// event `record_param_comms`. `begin` asks for a profiler again, since its event belongs to another scope.
template <typename Body>
WorkPtr Backend::with_comms_event(OpType type, const Call& call, [[maybe_unused]] bool async, at::TensorList inputs,
                                  at::TensorList outputs, const Body& body) {
  const bool p2p = c10d::isP2POp(type);  // messages are counted apart, as NCCL's backend does
  const std::uint64_t number = (p2p ? messages_ : sequence_).fetch_add(1, std::memory_order_relaxed) + 1;
  if (C10_LIKELY(!at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value())) return body();
  const auto sequence = std::make_tuple(static_cast<std::int64_t>(number), p2p);
  const auto group = std::make_tuple(pg_uid_, pg_desc_);
  const at::TensorList tensors = inputs.empty() ? outputs : inputs;
  const auto dtype = tensors.empty() ? at::kByte : tensors.front().scalar_type();
  const auto input_sizes = split_sizes(type, call.input_parts, inputs);
  const auto output_sizes = split_sizes(type, call.output_parts, outputs);
  const auto& ranks = options_->global_ranks_in_group;  // empty in the default group
  const int first = ranks.empty() ? 0 : static_cast<int>(ranks.front());
  int stride = ranks.empty() ? 1 : 0;  // -1: no stride describes the ranks
  if (ranks.size() > 1) stride = static_cast<int>(ranks[1]) - first;
  for (std::size_t i = 1; i < ranks.size(); ++i)
    if (static_cast<int>(ranks[i]) != first + static_cast<int>(i) * stride) stride = -1;
  const int rank = p2p ? call.root : rank_;  // NCCL's convention: the peer
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(sequence, group, inputs.vec(), outputs.vec(), rank, nccl_name(type, call),
                                        elements(inputs), elements(outputs), dtype, input_sizes, output_sizes, first,
                                        stride, size_, async)
#else  // torch 2.11
  RECORD_PARAM_COMMS_DATA(sequence, group, inputs.vec(), outputs.vec(), rank, nccl_name(type, call), elements(inputs),
                          elements(outputs), dtype, input_sizes, output_sizes, first, stride, size_)
#endif
  return body();
}

WorkPtr Backend::launch(OpType type, Task&& task, bool async, at::TensorList inputs, at::TensorList outputs) {
  return with_comms_event(type, task.call, async, inputs, outputs,
                          [&] { return run_or_submit(type, std::move(task), async, inputs, outputs); });
}

WorkPtr Backend::launch(OpType type, std::vector<Task>&& tasks, bool async, at::TensorList inputs,
                        at::TensorList outputs) {
  return with_comms_event(type, tasks.front().call, async, inputs, outputs,
                          [&] { return run_or_submit(type, std::move(tasks), async, inputs, outputs); });
}

WorkPtr Backend::run_or_submit(OpType type, Task&& task, bool async, at::TensorList inputs, at::TensorList outputs) {
  if (C10_UNLIKELY(task.on_device()))
    return devices_.launch(type, {&task, 1}, async, inputs, outputs, sequence_.load(), batches_.find());
  if (deferred(async)) return submit(type, {&task, 1}, inputs, outputs);
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (C10_LIKELY(!callbacks.has_value())) {
    run(task);
    return nullptr;
  }
  at::RecordFunction span(std::move(*callbacks));
  open_span(span, task.site().title, inputs);
  run(task);
  return nullptr;
}

WorkPtr Backend::run_or_submit(OpType type, std::vector<Task>&& tasks, bool async, at::TensorList inputs,
                               at::TensorList outputs) {
  const bool on_device = tasks.front().on_device();
  for (const Task& task : tasks) {
    if (task.on_device() == on_device) continue;
    task.site().refuse("DeviceError", "got tensors on the cpu and on a device, expected one device for all of them; ",
                       "make two calls");
  }
  if (on_device) return devices_.launch(type, tasks, async, inputs, outputs, sequence_.load(), batches_.find());
  if (deferred(async)) return submit(type, tasks, inputs, outputs);
  at::RecordFunction span(at::RecordScope::USER_SCOPE);
  open_span(span, tasks.front().site().title, inputs);
  for (Task& task : tasks) run(task);
  return nullptr;
}

void Backend::startCoalescing() { batches_.begin(); }

WorkPtr Backend::endCoalescing() {
  std::optional<Batch> batch = batches_.end();
  if (!batch) return nullptr;
  auto on_cpu = std::exchange(batch->on_cpu, {});
  if (on_cpu) on_cpu->finish_adding();
  WorkPtr on_device = devices_.launch(*std::move(batch));
  if (!on_device) return on_cpu;
  if (on_cpu) on_cpu->wait();  // a call cannot return both
  return on_device;
}

// -- collectives -----------------------------------------------------------------------------------------------------

Task Backend::allreduce_task(const Site& at, const Tensor& tensor, const c10d::AllreduceOptions& opts) {
  Task task(at, Op::kAllReduce, deferred(opts.asyncOp), opts.timeout);
  task.reduces(tensor, opts.reduceOp);
  task.call.input = task.call.output = task.updates(tensor);
  task.call.count = task.count(tensor);
  return task;
}

WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Site at = site("ringcomm:all_reduce");
  const Tensor& tensor = only(at, tensors);
  if (C10_UNLIKELY(tensor.defined() && tensor.layout() == c10::kSparse && tensor.is_cpu()))
    return all_reduce_sparse(tensors, opts);
  return launch(OpType::ALLREDUCE, allreduce_task(at, tensor, opts), opts.asyncOp, tensors, tensors);
}

WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  const Site at = site("ringcomm:all_reduce_coalesced");
  same_length(at, tensors.size(), tensors.size());
  std::vector<Task> tasks;
  tasks.reserve(tensors.size());
  for (const Tensor& tensor : tensors) tasks.push_back(allreduce_task(at, tensor, opts));
  return launch(OpType::ALLREDUCE_COALESCED, std::move(tasks), opts.asyncOp, tensors, tensors);
}

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Site at = site("ringcomm:broadcast");
  const Tensor& tensor = only(at, tensors);
  Task task(at, Op::kBroadcast, deferred(opts.asyncOp), opts.timeout);
  task.root(opts.rootRank);
  task.moves(tensor);
  if (rank_ == opts.rootRank) {
    task.call.input = task.reads(tensor);
    task.call.output = const_cast<void*>(task.call.input);
  } else {
    task.call.output = task.writes(tensor);
  }
  task.call.count = task.count(tensor);
  return launch(OpType::BROADCAST, std::move(task), opts.asyncOp, tensors, tensors);
}

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Site at = site("ringcomm:reduce");
  const Tensor& tensor = only(at, tensors);
  Task task(at, Op::kReduce, deferred(opts.asyncOp), opts.timeout);
  task.root(opts.rootRank);
  task.reduces(tensor, opts.reduceOp);
  if (rank_ == opts.rootRank) {
    task.call.input = task.call.output = task.updates(tensor);
  } else {
    task.call.input = task.reads(tensor);
  }
  task.call.count = task.count(tensor);
  return launch(OpType::REDUCE, std::move(task), opts.asyncOp, tensors, tensors);
}

Task Backend::allgather_task(const Site& at, Tensor& output, const Tensor& input, bool async,
                             std::chrono::milliseconds timeout) {
  Task task(at, Op::kAllGather, async, timeout);
  task.moves(input);
  same_count(at, "the output, the input's times the world size", input.numel() * size_, output.numel());
  task.call.input = task.reads(input);
  task.call.output = task.writes(output);
  const std::size_t count = task.call.count = task.count(input);
  const char* own = static_cast<char*>(task.call.output) + rank_ * count * element_bytes(task.call.dtype);
  task.separate(count, count * size_, task.call.input == own);
  return task;
}

Task Backend::allgather_task(const Site& at, const Tensors& outputs, const Tensor& input, bool async,
                             std::chrono::milliseconds timeout) {
  Task task(at, Op::kAllGather, async, timeout);
  task.moves(input);
  same_count(at, "the output of this rank, as in its input", input.numel(), outputs[rank_].numel());
  task.call.input = task.reads(input);
  task.writes(outputs);
  task.call.count = task.count(input);
  task.separate_parts();
  return task;
}

WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const Site at = site("ringcomm:all_gather");
  const Tensor& input = only(at, inputs);
  const Tensors& parts = parts_of(at, outputs, "output");
  return launch(OpType::ALLGATHER, allgather_task(at, parts, input, deferred(opts.asyncOp), opts.timeout), opts.asyncOp,
                inputs, parts);
}

WorkPtr Backend::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) {
  const Site at = site("ringcomm:all_gather_into_tensor");
  return launch(OpType::_ALLGATHER_BASE, allgather_task(at, output, input, deferred(opts.asyncOp), opts.timeout),
                opts.asyncOp, input, output);
}

WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& opts) {
  const Site at = site("ringcomm:all_gather_coalesced");
  same_length(at, inputs.size(), inputs.size());
  std::vector<Task> tasks;
  Tensors all;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    std::vector<Tensors> parts(1);
    for (const Tensors& of_rank : outputs) {
      same_length(at, of_rank.size(), inputs.size());
      parts[0].push_back(of_rank[i]);
    }
    tasks.push_back(allgather_task(at, parts_of(at, parts, "output"), inputs[i], deferred(opts.asyncOp), opts.timeout));
    all.insert(all.end(), parts[0].begin(), parts[0].end());
  }
  return launch(OpType::ALLGATHER_COALESCED, std::move(tasks), opts.asyncOp, inputs, all);
}

WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& opts) {
  const Site at = site("ringcomm:all_gather_into_tensor_coalesced");
  same_length(at, outputs.size(), inputs.size());
  std::vector<Task> tasks;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    tasks.push_back(allgather_task(at, outputs[i], inputs[i], deferred(opts.asyncOp), opts.timeout));
  }
  return launch(OpType::COALESCED, std::move(tasks), opts.asyncOp, inputs, outputs);
}

WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const Site at = site("ringcomm:gather");
  const Tensor& input = only(at, inputs);
  Task task(at, Op::kGather, deferred(opts.asyncOp), opts.timeout);
  task.root(opts.rootRank);
  task.moves(input);
  task.call.input = task.reads(input);
  task.call.count = task.count(input);
  if (rank_ != opts.rootRank) {
    no_parts_elsewhere(at, outputs, "output", opts.rootRank);
    return launch(OpType::GATHER, std::move(task), opts.asyncOp, inputs, {});
  }
  const Tensors& parts = parts_of(at, outputs, "output");
  same_count(at, "the output of this rank, as in its input", input.numel(), parts[rank_].numel());
  task.writes(parts);
  task.separate_parts();
  return launch(OpType::GATHER, std::move(task), opts.asyncOp, inputs, parts);
}

WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  const Site at = site("ringcomm:scatter");
  const Tensor& output = only(at, outputs);
  Task task(at, Op::kScatter, deferred(opts.asyncOp), opts.timeout);
  task.root(opts.rootRank);
  task.moves(output);
  task.call.output = task.writes(output);
  task.call.count = task.count(output);
  if (rank_ != opts.rootRank) {
    no_parts_elsewhere(at, inputs, "input", opts.rootRank);
    return launch(OpType::SCATTER, std::move(task), opts.asyncOp, {}, outputs);
  }
  const Tensors& parts = parts_of(at, inputs, "input");
  same_count(at, "the output, as in the input of this rank", parts[rank_].numel(), output.numel());
  task.reads(parts);
  task.separate_parts();
  return launch(OpType::SCATTER, std::move(task), opts.asyncOp, parts, outputs);
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ReduceScatterOptions& opts) {
  const Site at = site("ringcomm:reduce_scatter");
  const Tensor& output = only(at, outputs);
  const Tensors& parts = parts_of(at, inputs, "input");
  Task task(at, Op::kReduceScatter, deferred(opts.asyncOp), opts.timeout);
  task.reduces(output, opts.reduceOp);
  same_count(at, "the output, as in the input of this rank", parts[rank_].numel(), output.numel());
  task.reads(parts);
  task.call.output = task.writes(output);
  task.call.count = task.count(output);
  task.separate_parts();
  return launch(OpType::REDUCE_SCATTER, std::move(task), opts.asyncOp, parts, outputs);
}

Task Backend::reduce_scatter_task(const Site& at, Tensor& output, const Tensor& input,
                                  const c10d::ReduceScatterOptions& opts, bool async) {
  Task task(at, Op::kReduceScatter, async, opts.timeout);
  task.reduces(output, opts.reduceOp);
  same_count(at, "the input, the output's times the world size", output.numel() * size_, input.numel());
  task.call.input = task.reads(input);
  task.call.output = task.writes(output);
  const std::size_t count = task.call.count = task.count(output);
  const char* own = static_cast<const char*>(task.call.input) + rank_ * count * element_bytes(task.call.dtype);
  task.separate(count * size_, count, task.call.output == own);
  return task;
}

WorkPtr Backend::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) {
  const Site at = site("ringcomm:reduce_scatter_tensor");
  return launch(OpType::_REDUCE_SCATTER_BASE, reduce_scatter_task(at, output, input, opts, deferred(opts.asyncOp)),
                opts.asyncOp, input, output);
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& opts) {
  const Site at = site("ringcomm:reduce_scatter_tensor_coalesced");
  same_length(at, outputs.size(), inputs.size());
  std::vector<Task> tasks;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    tasks.push_back(reduce_scatter_task(at, outputs[i], inputs[i], opts, deferred(opts.asyncOp)));
  }
  return launch(OpType::COALESCED, std::move(tasks), opts.asyncOp, inputs, outputs);
}

WorkPtr Backend::alltoall_base(Tensor& output, Tensor& input, std::vector<std::int64_t>& output_rows,
                               std::vector<std::int64_t>& input_rows, const c10d::AllToAllOptions& opts) {
  const Site at = site("ringcomm:all_to_all_single");
  Task task(at, Op::kAllToAll, deferred(opts.asyncOp), opts.timeout);
  task.moves(input);
  const void* source = task.reads(input);
  void* target = task.writes(output);
  if (input_rows.empty() && output_rows.empty() && input.numel() == output.numel() && task.even(input) &&
      task.even(output)) {
    task.call.input = source;
    task.call.output = target;
    task.call.count = task.count(input) / size_;
    task.separate(task.count(input), task.count(input), false);
    return launch(OpType::ALLTOALL_BASE, std::move(task), opts.asyncOp, input, output);
  }
  task.split(task.call.input_parts, input, const_cast<void*>(source), input_rows, "input");
  task.split(task.call.output_parts, output, target, output_rows, "output");
  const auto own = static_cast<std::size_t>(rank_);
  same_count(at, "the output's part of this rank, as in its input's part",
             static_cast<std::int64_t>(task.call.input_parts[own].count),
             static_cast<std::int64_t>(task.call.output_parts[own].count));
  task.separate_parts();
  return launch(OpType::ALLTOALL_BASE, std::move(task), opts.asyncOp, input, output);
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  const Site at = site("ringcomm:all_to_all");
  const Tensors& sources = one_for_each_rank(at, inputs, "input");
  const Tensors& targets = one_for_each_rank(at, outputs, "output");
  Task task(at, Op::kAllToAll, deferred(opts.asyncOp), opts.timeout);
  task.moves(sources[0]);
  same_count(at, "the output of this rank, as in its input", sources[rank_].numel(), targets[rank_].numel());
  task.reads(sources);
  task.writes(targets);
  task.separate_parts();
  return launch(OpType::ALLTOALL, std::move(task), opts.asyncOp, inputs, outputs);
}

// -- between two ranks -----------------------------------------------------------------------------------------------

WorkPtr Backend::send(Tensors& tensors, int peer, int tag) {
  const Site at = site("ringcomm:send");
  const Tensor& tensor = only(at, tensors);
  Task task(at, Op::kSend, true, c10d::kUnsetTimeout);
  task.root(peer);
  task.moves(tensor);
  task.call.tag = tag;
  task.call.input = task.reads(tensor);
  task.call.count = task.count(tensor);
  return launch(OpType::SEND, std::move(task), true, tensors, tensors);
}

WorkPtr Backend::receive(Tensors& tensors, const Site& at, OpType type, int peer, int tag) {
  const Tensor& tensor = only(at, tensors);
  Task task(at, Op::kRecv, true, c10d::kUnsetTimeout);
  task.moves(tensor);
  if (type == OpType::RECV)
    task.root(peer);
  else
    task.call.root = kAnySource;
  task.call.tag = tag;
  task.call.output = task.writes(tensor);
  task.call.count = task.count(tensor);
  return launch(type, std::move(task), true, tensors, tensors);
}

WorkPtr Backend::recv(Tensors& tensors, int peer, int tag) {
  return receive(tensors, site("ringcomm:recv"), OpType::RECV, peer, tag);
}

WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, site("ringcomm:recvAnySource"), OpType::RECVANYSOURCE, kAnySource, tag);
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
  Task task(site("ringcomm:barrier"), Op::kBarrier, deferred(opts.asyncOp), opts.timeout);
  task.without_tensor();
  return launch(OpType::BARRIER, std::move(task), opts.asyncOp, {}, {});
}

}  // namespace ringcomm
