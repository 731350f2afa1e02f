// The streams of one device, through torch's generic interface: without CUDA headers, so that one source works with
// every torch.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

#include "core/engine.h"

namespace ringcomm {

// Empty where there is nothing to wait for.
using Event = std::optional<c10::Event>;

// Whether the device has reached the event. Safe while another thread captures a graph in CUDA's global mode, which a
// plain query would invalidate.
bool reached(const c10::Event& event);
// Blocks the host until the device has reached the event.
void await(const c10::Event& event);

class Streams {
 public:
  virtual ~Streams() = default;
  // The current stream of the calling thread; and side streams, which are internal and of high priority, by index.
  virtual c10::Stream current() const = 0;
  virtual c10::Stream side(std::size_t index) = 0;
  // Makes the first side streams now: later this might wait for kernels that wait for this rank.
  virtual void prepare(std::size_t num_side_streams) = 0;
  // The stream as the number that the engine expects.
  virtual std::uintptr_t handle(const c10::Stream& stream) const = 0;
  // Whether work enqueued on the stream is captured in a graph: the host must then neither query its events nor wait
  // for them.
  virtual bool capturing(const c10::Stream& stream) const = 0;
  virtual Event record(const c10::Stream& stream) = 0;
  // Takes back an event of `record` that is no longer used, to record it again.
  virtual void reuse(c10::Event event) = 0;
  // Makes `later` wait until the work enqueued on `earlier` so far is done.
  virtual void order(const c10::Stream& earlier, const c10::Stream& later) = 0;
  // Keeps the memory of `tensor` from being reused before `stream` has reached this point, even if the tensor is
  // dropped.
  virtual void keep_until_here(const at::Tensor& tensor, const c10::Stream& stream) const = 0;
  // Must be called after the engine has enqueued a call.
  virtual void enqueued(Engine& engine, const c10::Stream& stream) const = 0;
};

// Whether the device's current stream is being captured in a graph.
bool captures(c10::Device device);

// `engine` lends the side streams.
std::shared_ptr<Streams> device_streams(c10::Device device, std::shared_ptr<Engine> engine);

// For an engine whose device memory is the host's (the emulated one): the only stream is the calling thread, and a call
// has ended once it is enqueued, as with CUDA_LAUNCH_BLOCKING=1.
std::shared_ptr<Streams> host_streams();

}  // namespace ringcomm
