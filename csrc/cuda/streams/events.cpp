#include "cuda/streams/events.h"

#include <iterator>
#include <map>
#include <set>

#include "core/error.h"

namespace ringcomm::cuda {

namespace {

struct IdleStreams {
  std::mutex mutex;
  std::map<int, std::vector<cudaStream_t>> by_device;
  std::set<cudaStream_t> all;  // those that are lent, too
};
IdleStreams& idle_streams() {
  static auto* const all = new IdleStreams;  // engines may outlive static objects
  return *all;
}

bool is_never_destroyed(cudaStream_t stream) {
  if (is_default(stream)) return true;
  IdleStreams& idle = idle_streams();
  const std::lock_guard<std::mutex> lock(idle.mutex);
  return idle.all.count(stream) != 0;
}

}  // namespace

cudaStream_t lend_stream(int device, int rank) {
  IdleStreams& idle = idle_streams();
  {
    const std::lock_guard<std::mutex> lock(idle.mutex);
    std::vector<cudaStream_t>& here = idle.by_device[device];
    if (!here.empty()) {
      const cudaStream_t stream = here.back();
      here.pop_back();
      return stream;
    }
  }
  const DeviceScope on(device, rank);
  int least = 0, greatest = 0;
  cudaStream_t stream = nullptr;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange", rank);
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "cudaStreamCreate of a stream to lend",
        rank);
  const std::lock_guard<std::mutex> lock(idle.mutex);
  idle.all.insert(stream);
  return stream;
}

void take_back_stream(int device, cudaStream_t stream) {
  IdleStreams& idle = idle_streams();
  const std::lock_guard<std::mutex> lock(idle.mutex);
  idle.by_device[device].push_back(stream);
}

bool is_capturing(cudaStream_t stream, int rank) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing of the call's stream", rank);
  return status != cudaStreamCaptureStatusNone;
}

unsigned long long capture_of(cudaStream_t stream, int rank) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo of the call's stream", rank);
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

bool reached(const StreamEvent& event, int rank) {
  if (event.capture) return true;
  const RelaxedCapture relaxed(rank);
  const cudaError_t status = cudaEventQuery(event.handle);
  if (status == cudaErrorNotReady) return false;
  check(status, "cudaEventQuery", rank);
  return true;
}

StreamEvents::~StreamEvents() {
  if (process_is_ending() || idle_.empty()) return;
  try {
    const DeviceScope on(device_, 0);  // a thread without a context would make one on device 0
    for (cudaEvent_t event : idle_) tolerate(cudaEventDestroy(event), "cudaEventDestroy");
  } catch (const Error&) {
    // the device is lost, and they with it
  }
}

cudaEvent_t StreamEvents::take(int rank) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      const cudaEvent_t event = idle_.back();
      idle_.pop_back();
      return event;
    }
  }
  const RelaxedCapture relaxed(rank);
  cudaEvent_t event;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate", rank);
  return event;
}

StreamEventPtr StreamEvents::record(cudaStream_t stream, unsigned long long capture, int rank) {
  const cudaEvent_t handle = take(rank);
  StreamEventPtr event(new StreamEvent{handle, stream, capture},
                       [events = shared_from_this()](const StreamEvent* event) {
                         {
                           const std::lock_guard<std::mutex> lock(events->mutex_);
                           events->idle_.push_back(event->handle);
                         }
                         delete event;
                       });
  check(cudaEventRecord(handle, stream), "cudaEventRecord", rank);
  return event;
}

void StreamEvents::follow(cudaStream_t stream, unsigned long long capture, const StreamEventPtr& event, int rank) {
  if (!event || event->capture != capture)
    return;  // the same stream too: handles are used again, and 0 is one per device
  check(cudaStreamWaitEvent(stream, event->handle, 0), "cudaStreamWaitEvent", rank);
}

bool StreamEvents::is_of(cudaStream_t stream, const StreamEvent& event, bool has_stayed) {
  return event.stream == stream && (has_stayed || is_never_destroyed(stream));
}

void StreamEvents::follow_here(cudaStream_t stream, unsigned long long capture, const StreamEventPtr& event,
                               bool has_stayed, int rank) {
  if (!event || !is_of(stream, *event, has_stayed)) follow(stream, capture, event, rank);
}

void LatestEvents::follow(cudaStream_t stream, unsigned long long capture, int rank) const {
  const auto it = events_.find(capture);
  if (it != events_.end()) StreamEvents::follow_here(stream, capture, it->second, false, rank);
}

void LatestEvents::put(const StreamEventPtr& event) {
  constexpr std::size_t kCaptures = 8;  // under way at once; ids grow
  events_[event->capture] = event;
  if (events_.size() > kCaptures + 1) events_.erase(std::next(events_.begin(), events_.begin()->first == 0 ? 1 : 0));
}

StreamEventPtr LatestEvents::eager() const {
  const auto it = events_.find(0);
  return it == events_.end() ? nullptr : it->second;
}

}  // namespace ringcomm::cuda
