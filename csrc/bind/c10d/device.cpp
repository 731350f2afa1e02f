#include "bind/c10d/device.h"

#include <torch/csrc/python_headers.h>

#include <c10/core/StreamGuard.h>

#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "core/call/parts.h"

namespace ringcomm {
namespace {

using c10d::OpType;
using Tasks = std::span<Task>;

// Whether an engine may handle two calls of a batch together.
bool alike(const Call& a, const Call& b) {
  if (point_to_point(a.op) || point_to_point(b.op)) return point_to_point(a.op) && point_to_point(b.op);
  return a.op == b.op && a.dtype == b.dtype && a.reduce_op == b.reduce_op && a.root == b.root && a.factor == b.factor;
}

// Side stream 0 is for everything except single sends and receives.
std::size_t side_stream_of(OpType type, const Task& task) {
  if (!c10d::isP2POp(type)) return 0;
  const auto peer = static_cast<std::size_t>(task.call.root + 1);  // kAnySource is -1
  return 2 * peer + (task.call.op == Op::kSend ? 1 : 2);
}

std::size_t num_side_streams(int world_size) { return 2 * static_cast<std::size_t>(world_size) + 3; }
// The number of streams for the largest expected number of ranks on one host; further ones are made when first used.
constexpr std::size_t kMostPreparedStreams = 67;

// Returns the source of a single receive, else -1 or a meaningless number.
int enqueue(const DeviceLink& link, Tasks tasks, const c10::Stream& stream) {
  const std::uintptr_t handle = link.streams->handle(stream);
  for (Task& task : tasks) task.call.stream = handle;
  int source = -1;
  if (tasks.size() == 1) {
    source = link.engine->run(tasks[0].call);
  } else {
    std::vector<Call> list;
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      list.push_back(std::move(tasks[i].call));
      if (i + 1 < tasks.size() && alike(list.back(), tasks[i + 1].call)) continue;
      link.engine->run_list(list);
      list.clear();
    }
  }
  link.streams->enqueued(*link.engine, stream);
  for (Task& task : tasks) {
    if (task.pairs.empty()) continue;
    const c10::StreamGuard guard(stream);
    write_back(task.pairs);
  }
  return source;
}

// Returns the tensors that must live until `stream` has passed the tasks. Copies are known only here, and no caller
// waits for them, so the allocator is told to keep their memory.
Tensors claim(const DeviceLink& link, Tasks tasks, const c10::Stream& stream) {
  Tensors tensors;
  for (Task& task : tasks) {
    std::move(task.keep.begin(), task.keep.end(), std::back_inserter(tensors));
    for (const auto& [tensor, copy] : task.pairs) tensors.push_back(tensor);
    for (const Tensor& copy : task.copies) link.streams->keep_until_here(copy, stream);
  }
  return tensors;
}

// Releases the GIL, if this thread has it, until the result is destroyed: other ranks may be threads of this process.
std::optional<py::gil_scoped_release> release_gil() {
  using Released = std::optional<py::gil_scoped_release>;
  return PyGILState_Check() != 0 ? Released(std::in_place) : Released();
}

bool any_barrier(Tasks tasks) {
  return std::any_of(tasks.begin(), tasks.end(), [](const Task& task) { return task.call.op == Op::kBarrier; });
}

}  // namespace

// -- connecting ------------------------------------------------------------------------------------------------------

void DeviceGroup::open(const Site& site, c10::Device device) {
  if (C10_UNLIKELY(!connected_)) make(site, device);
  if (C10_LIKELY(link_->device == device)) return;
  site.refuse("DeviceError", "got a tensor on ", device, ", expected one on ", link_->device,
              ", where this group made its first call; call torch.cuda.set_device(", int{link_->device.index()},
              ") first, or make a new group for the other device");
}

void DeviceGroup::make(const Site& site, c10::Device device) {
  const auto released = release_gil();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (connected_ || (made_ && link_->device == device)) return;
  if (!device.is_cpu() && c10::impl::hasDeviceGuardImpl(device.type()) && captures(device)) {
    site.refuse("InvalidArgumentError", "got the group's first call on ", device, " while a graph is captured, ",
                "expected an earlier one, which connects the ranks; make one call before the capture");
  }
  auto engine = factory_.make(site.call(), device);
  auto streams = device.is_cpu() ? host_streams() : device_streams(device, engine);
  streams->prepare(std::min(kMostPreparedStreams, num_side_streams(engine->world_size())));
  link_ = std::make_shared<DeviceLink>(DeviceLink{std::move(engine), device, std::move(streams)});
  made_ = true;
}

void DeviceGroup::connect(const char* call) {
  if (C10_LIKELY(connected_)) return;
  const auto released = release_gil();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (connected_) return;
  link_->engine = factory_.connect(call);
  connected_ = true;
}

// -- running ---------------------------------------------------------------------------------------------------------

WorkPtr DeviceGroup::launch(OpType type, Tasks tasks, bool async, at::TensorList inputs, at::TensorList outputs,
                            std::uint64_t sequence, Batch* batch) {
  connect(tasks.front().site().call());
  if (!batch) return start(tasks.front().site().title, type, tasks, async, inputs, outputs, sequence);
  for (Task& task : tasks) batch->on_device.push_back(std::move(task));
  batch->outputs.insert(batch->outputs.end(), outputs.begin(), outputs.end());
  batch->async |= async;
  batch->sequence = sequence;
  return nullptr;
}

WorkPtr DeviceGroup::launch(Batch batch) {
  if (batch.on_device.empty()) return nullptr;
  return start("ringcomm:coalesced", OpType::COALESCED, batch.on_device, batch.async, {}, batch.outputs,
               batch.sequence);
}

WorkPtr DeviceGroup::start(const char* title, OpType type, Tasks tasks, bool async, at::TensorList inputs,
                           at::TensorList outputs, std::uint64_t sequence) {
  at::RecordFunction span(at::RecordScope::USER_SCOPE);
  open_span(span, title, inputs);
  const c10::Stream current = link_->streams->current();
  if (async) return start_beside(current, title, type, tasks, outputs, sequence);
  const bool barrier = any_barrier(tasks);
  enqueue(*link_, tasks, current);
  if (barrier && !link_->streams->capturing(current)) {
    if (Event end = link_->streams->record(current)) {
      await(*end);
      link_->streams->reuse(std::move(*end));
    }
    link_->check("barrier");
  }
  return nullptr;
}

WorkPtr DeviceGroup::start_beside(const c10::Stream& current, const char* title, OpType type, Tasks tasks,
                                  at::TensorList outputs, std::uint64_t sequence) {
  Streams& streams = *link_->streams;
  const c10::Stream side = streams.side(side_stream_of(type, tasks.front()));
  const bool captured = streams.capturing(current), barrier = any_barrier(tasks);
  if (!captured) forget_ended();
  streams.order(current, side);
  Tensors tensors = claim(*link_, tasks, side);
  int source = -1;
  std::exception_ptr error;
  try {
    source = enqueue(*link_, tasks, side);
  } catch (...) {  // a part of a batch may be enqueued already
    error = std::current_exception();
  }
  const auto in_flight = std::make_shared<CallTensors>(link_->streams, side, captured, std::move(tensors));
  hold(in_flight);
  if (error) std::rethrow_exception(error);
  return c10::make_intrusive<DeviceWork>(rank_, type, title + Site::kPrefix, sequence, source, barrier, side, link_,
                                         in_flight, outputs.vec());
}

void DeviceGroup::hold(std::shared_ptr<CallTensors> in_flight) {
  const std::lock_guard<std::mutex> lock(mutex_);
  in_flight_.push_back(std::move(in_flight));
}

// Forgets calls in the order in which they were made, which is nearly that of their ends. A graph keeps the memory that
// it has captured.
void DeviceGroup::forget_ended() {
  std::deque<std::shared_ptr<CallTensors>> ended;  // tensors are freed outside of the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!in_flight_.empty()) {
    const CallTensors& oldest = *in_flight_.front();
    if (!oldest.released() && !oldest.captured && !oldest.ended()) return;
    ended.push_back(std::move(in_flight_.front()));
    in_flight_.pop_front();
  }
}

// -- abort and close --------------------------------------------------------------------------------------------------

void DeviceGroup::set_timeout(std::int64_t timeout_ms) {
  if (made_) link_->engine->set_timeout(timeout_ms);
}

void DeviceGroup::abort(const std::string& reason) {
  if (made_) link_->engine->abort(reason, ErrorCode::kAborted);
}

void DeviceGroup::close() {
  if (made_) link_->engine->close();
}

}  // namespace ringcomm
