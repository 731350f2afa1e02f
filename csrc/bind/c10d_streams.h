// The streams of one device, in torch's own generic terms: no header of CUDA, so that one source serves every torch.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

#include "core/engine.h"

namespace ringcomm {

// Nothing where there is nothing to wait for.
using Event = std::optional<c10::Event>;

// Whether the device has come there. Another thread may be capturing a graph in CUDA's global mode, which a plain query
// would invalidate.
bool reached(const c10::Event& event);
// Blocks the host until it has.
void await(const c10::Event& event);

class Streams {
 public:
  virtual ~Streams() = default;
  // The current stream of the calling thread, and internal ones of high priority: one for each lane.
  virtual c10::Stream current() const = 0;
  virtual c10::Stream side(std::size_t lane) = 0;
  // Makes the streams of the first lanes now: later that might wait for kernels that wait for us.
  virtual void prepare(std::size_t num_lanes) = 0;
  // The engine's word for a stream.
  virtual std::uintptr_t handle(const c10::Stream& stream) const = 0;
  // Whether what is enqueued goes into a graph: its events must then be neither queried nor waited for by the host.
  virtual bool capturing(const c10::Stream& stream) const = 0;
  virtual Event record(const c10::Stream& stream) = 0;
  // An event of `record` that nobody looks at any more: it is recorded again.
  virtual void reuse(c10::Event event) = 0;
  // `later` goes on when what is now enqueued on `earlier` is done.
  virtual void order(const c10::Stream& earlier, const c10::Stream& later) = 0;
  // The memory of `tensor` is not used again before `stream` has come to this point, even if nobody keeps the tensor.
  virtual void keep_until_here(const at::Tensor& tensor, const c10::Stream& stream) const = 0;
  // To be called after the engine has enqueued something.
  virtual void enqueued(Engine& engine, const c10::Stream& stream) const = 0;
};

// Whether the current stream there goes into a graph.
bool captures(c10::Device device);

// `engine` lends the streams of the lanes.
std::shared_ptr<Streams> device_streams(c10::Device device, std::shared_ptr<Engine> engine);

// For an engine whose device memory is the host's (the emulated one): the only stream is the calling thread, and a call
// has ended when it is enqueued, as with CUDA_LAUNCH_BLOCKING=1.
std::shared_ptr<Streams> host_streams();

}  // namespace ringcomm
