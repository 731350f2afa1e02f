// The device side of a process group: an engine that is made at the first call on a device, and the streams of calls. A
// call with invalid arguments makes this rank's engine, but does not wait for other ranks.
//
// A synchronous call runs on the caller's current stream. An asynchronous call runs on an internal stream that first
// waits for the current one; the current stream waits for it in Work::wait. Sends and receives outside of a batch have
// internal streams of their own, one for each peer and direction, so that they wait only for each other.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include <ATen/Context.h>

#include "bind/c10d/batch.h"
#include "bind/c10d/device_work.h"

namespace ringcomm {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class DeviceGroup {
 public:
  struct EngineFactory {
    std::function<std::shared_ptr<Engine>(const char* call, c10::Device device)> make;
    // Connects the engine that `make` returned last with those of all other ranks; the result is used from then on.
    std::function<std::shared_ptr<Engine>(const char* call)> connect;
  };

  // With `host_memory` it serves cpu tensors: for an engine whose device memory is the host's.
  DeviceGroup(int rank, EngineFactory factory, bool host_memory)
      : rank_(rank), type_(host_memory ? c10::kCPU : c10::kCUDA), factory_(std::move(factory)) {}

  bool serves(c10::Device device) const { return device.type() == type_; }
  // Whether there can be calls on a device.
  bool possible() const { return type_ == c10::kCPU || made_ || at::hasCUDA(); }
  bool connected() const { return connected_; }
  // Prepares for calls on a device; raises unless it is the device of the group's first call.
  void open(const Site& site, c10::Device device);
  // Connects with all other ranks, unless that was done before.
  void connect(const char* call);

  // Runs prepared calls. A profiler records `inputs`; `outputs` become the Work's result and its future's value.
  // Returns null if the call is synchronous, or if it joins a batch; `batch`: null outside of one.
  WorkPtr launch(c10d::OpType type, std::span<Task> tasks, bool async, at::TensorList inputs, at::TensorList outputs,
                 std::uint64_t sequence, Batch* batch);
  WorkPtr launch(Batch batch);  // returns null if none of its calls is asynchronous

  void set_timeout(std::int64_t timeout_ms);
  bool aborted() const { return connected_ && link_->engine->aborted(); }
  void abort(const std::string& reason);
  void close();

 private:
  void make(const Site& site, c10::Device device);
  WorkPtr start(const char* title, c10d::OpType type, std::span<Task> tasks, bool async, at::TensorList inputs,
                at::TensorList outputs, std::uint64_t sequence);
  WorkPtr start_beside(const c10::Stream& current, const char* title, c10d::OpType type, std::span<Task> tasks,
                       at::TensorList outputs, std::uint64_t sequence);
  void hold(std::shared_ptr<CallTensors> in_flight);
  void forget_ended();

  const int rank_;
  const c10::DeviceType type_;
  EngineFactory factory_;
  std::mutex mutex_;  // for the factory and the calls in flight
  std::shared_ptr<DeviceLink> link_;
  std::atomic<bool> made_{false}, connected_{false};
  std::deque<std::shared_ptr<CallTensors>> in_flight_;
};

}  // namespace ringcomm
