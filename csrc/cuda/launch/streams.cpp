#include "cuda/launch/streams.h"

#include <iterator>
#include <map>
#include <set>

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
  if (stream == nullptr || stream == cudaStreamLegacy) return true;
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
  const DeviceGuard guard(device, rank);
  const RelaxedCapture relaxed(rank);
  int least = 0, greatest = 0;
  cudaStream_t stream = nullptr;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange", rank);
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "cudaStreamCreate of a lane", rank);
  const std::lock_guard<std::mutex> lock(idle.mutex);
  idle.all.insert(stream);
  return stream;
}

void take_back_stream(int device, cudaStream_t stream) {
  IdleStreams& idle = idle_streams();
  const std::lock_guard<std::mutex> lock(idle.mutex);
  idle.by_device[device].push_back(stream);
}

unsigned long long capture_of(cudaStream_t stream, int rank) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo of the call's stream", rank);
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

bool reached(const Mark& mark, int rank) {
  if (mark.capture) return true;
  const RelaxedCapture relaxed(rank);
  const cudaError_t status = cudaEventQuery(mark.event);
  if (status == cudaErrorNotReady) return false;
  check(status, "cudaEventQuery of a call's end", rank);
  return true;
}

Marks::~Marks() {
  if (process_is_ending()) return;
  for (cudaEvent_t event : idle_) tolerate(cudaEventDestroy(event), "cudaEventDestroy");
}

cudaEvent_t Marks::take(int rank) {
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

MarkPtr Marks::record(cudaStream_t stream, unsigned long long capture, int rank) {
  const cudaEvent_t event = take(rank);
  MarkPtr mark(new Mark{event, stream, capture}, [marks = shared_from_this()](const Mark* mark) {
    {
      const std::lock_guard<std::mutex> lock(marks->mutex_);
      marks->idle_.push_back(mark->event);
    }
    delete mark;
  });
  check(cudaEventRecord(event, stream), "cudaEventRecord on the call's stream", rank);
  return mark;
}

void Marks::follow(cudaStream_t stream, unsigned long long capture, const MarkPtr& mark, int rank) {
  if (!mark || mark->capture != capture)
    return;  // the same stream too: handles are used again, and 0 is one per device
  check(cudaStreamWaitEvent(stream, mark->event, 0), "cudaStreamWaitEvent on the call's stream", rank);
}

bool Marks::is_of(cudaStream_t stream, const Mark& mark, bool has_stayed) {
  return mark.stream == stream && (has_stayed || is_never_destroyed(stream));
}

void Marks::follow_here(cudaStream_t stream, unsigned long long capture, const MarkPtr& mark, bool has_stayed,
                        int rank) {
  if (!mark || !is_of(stream, *mark, has_stayed)) follow(stream, capture, mark, rank);
}

void Newest::follow(cudaStream_t stream, unsigned long long capture, int rank) const {
  const auto it = marks_.find(capture);
  if (it != marks_.end()) Marks::follow_here(stream, capture, it->second, false, rank);
}

void Newest::put(const MarkPtr& mark) {
  constexpr std::size_t kCaptures = 8;  // under way at once; ids grow
  marks_[mark->capture] = mark;
  if (marks_.size() > kCaptures + 1) marks_.erase(std::next(marks_.begin(), marks_.begin()->first == 0 ? 1 : 0));
}

MarkPtr Newest::eager() const {
  const auto it = marks_.find(0);
  return it == marks_.end() ? nullptr : it->second;
}

}  // namespace ringcomm::cuda
