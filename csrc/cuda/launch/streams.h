// Streams of the engine, and marks: points in streams that others wait for.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/runtime.h"

namespace ringcomm::cuda {

// Streams of the engine, of the highest priority. They wait for no other stream unless they are told to, and are never
// destroyed: a returned stream is lent again.
cudaStream_t lend_stream(int device, int rank);
void take_back_stream(int device, cudaStream_t stream);

// The capture that `stream` takes part in; 0: none.
unsigned long long capture_of(cudaStream_t stream, int rank);

// A point in a stream. Work that was captured into a graph and work that runs now do not wait for each other.
struct Mark {
  cudaEvent_t event = nullptr;
  cudaStream_t stream = nullptr;
  unsigned long long capture = 0;
};
using MarkPtr = std::shared_ptr<const Mark>;

// Whether the work before the mark is done. A captured mark counts as done, because its work runs when the graph is
// launched.
bool reached(const Mark& mark, int rank);

// Events of one device, which are reused.
class Marks : public std::enable_shared_from_this<Marks> {
 public:
  explicit Marks(int device) : device_(device) {}
  ~Marks();
  // The point where `stream` is now. The device is the current one.
  MarkPtr record(cudaStream_t stream, unsigned long long capture, int rank);
  // Work that is enqueued on `stream` from now on runs after the mark.
  static void follow(cudaStream_t stream, unsigned long long capture, const MarkPtr& mark, int rank);
  // Whether a stream of the mark's device is the mark's own, so that no wait is needed. An equal handle proves that
  // only if streams with that handle are never destroyed, or if the stream `has_stayed` alive since the mark was made.
  static bool is_of(cudaStream_t stream, const Mark& mark, bool has_stayed);
  // As `follow`, for a stream of the mark's device.
  static void follow_here(cudaStream_t stream, unsigned long long capture, const MarkPtr& mark, bool has_stayed,
                          int rank);

 private:
  cudaEvent_t take(int rank);

  const int device_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> idle_;
};

// The newest mark of a device's streams: one of the work that runs now, and one of each capture under way. There is no
// order between these.
class Newest {
 public:
  // Work that is enqueued on `stream` from now on runs after the newest mark of its own kind.
  void follow(cudaStream_t stream, unsigned long long capture, int rank) const;
  void put(const MarkPtr& mark);
  MarkPtr eager() const;  // null: none

 private:
  std::map<unsigned long long, MarkPtr> marks_;  // by capture; 0: none
};

}  // namespace ringcomm::cuda
