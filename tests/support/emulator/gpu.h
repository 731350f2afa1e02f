// The emulated GPUs of this process: streams with queues, and one thread that does their work. Kernels of all streams
// and all devices run together on one scheduler; the other work of a stream is done in between.
//
// To ThreadSanitizer every stream is a thread: an event, the legacy stream or the host orders two of them, as in CUDA,
// but not the fact that one thread does all the work. So the device thread's own bookkeeping (Task) is kept apart from
// what belongs to the stream (Grid, Payload), which it passes on without looking inside.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda_runtime.h"
#include "fibers.h"

namespace ringcomm::emulator {

struct Capture;

// One record of an event. A waiter waits for the record that was the last one when the wait was made.
struct Point {
  bool reached = false;
  std::uint64_t at_ns = 0;
  char sync = 0;
};
struct EventState {
  std::shared_ptr<Point> last;       // null: never recorded
  std::shared_ptr<Capture> capture;  // last recorded while this went on,
  int captured_as = 0;               // as its event of this number
  int device = 0;
  bool timed = true;
};

enum class Kind { kKernel, kCall, kHost, kRecord, kWait, kWaitWord };

// 32 bits in memory that a stream waits for.
struct Word {
  std::uint32_t* at = nullptr;
  std::uint32_t value = 0;

  bool reached() const { return static_cast<std::int32_t>(__atomic_load_n(at, __ATOMIC_ACQUIRE) - value) >= 0; }
};

// What a caller asks of a stream; a graph keeps a list of these.
struct Work {
  Kind kind;
  std::string name = {};
  Body body = {};
  dim3 grid = {}, block = {};
  bool cooperative = false;
  std::function<void()> call = {};
  std::shared_ptr<Point> point = {};
  int captured_event = -1;  // in a graph, in place of a point
  Word word = {};
  int other_device = -1;  // of a copy between two devices
};

struct Payload {
  std::function<void()> call;
  char sync = 0;
};
struct Task {
  Kind kind;
  std::uint64_t sequence = 0;  // of all tasks
  bool started = false, finished = false, cooperative = false;
  Grid* grid = nullptr;
  Payload* payload = nullptr;
  std::shared_ptr<Point> point = {};
  Word word = {};
  int other_device = -1;  // of a copy between two devices on the legacy stream
};

}  // namespace ringcomm::emulator

struct CUstream_st {
  int device = 0;
  unsigned flags = 0;
  bool legacy = false, destroyed = false;
  std::deque<ringcomm::emulator::Task> tasks;
  void* context = nullptr;
  char sync = 0;
  std::shared_ptr<ringcomm::emulator::Capture> capture;
  int branch = 0;

  bool blocking() const { return !legacy && !(flags & cudaStreamNonBlocking); }
};
struct CUevent_st {
  std::shared_ptr<ringcomm::emulator::EventState> state;
};

namespace ringcomm::emulator {

using Stream = CUstream_st;

struct Config {
  int devices, sms, sm_threads;
  std::uint64_t seed;
  unsigned preempt_every;
  unsigned copy_us;  // how long each asynchronous copy takes
  bool no_peer, no_driver, no_mps, no_mem_ops;
  static Config from_environment();
};

// All methods with `mutex` held, unless they say otherwise.
class Gpu {
 public:
  static Gpu& get();

  const Config config;
  std::mutex mutex;

  Stream* resolve(cudaStream_t handle, int device);  // null: no such stream
  Stream* create_stream(int device, unsigned flags);
  void destroy(Stream* stream);
  void enqueue(Stream* stream, const Work& work);
  cudaError_t error_of(int device) const { return errors_[device]; }

  // Waits, and makes the stream's work visible to the caller.
  void wait(std::unique_lock<std::mutex>& lock, Stream* stream);
  void wait(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Point>& point);
  void wait_device(std::unique_lock<std::mutex>& lock, int device);
  bool idle(const Stream* stream) const;

  int most_resident(unsigned block_threads) const;  // blocks of such threads that one SM holds

 private:
  Gpu();
  void device_thread();
  void callback_thread();

  bool may_start(const Stream& stream) const;
  bool may_copy(const Stream& stream) const;
  bool start_tasks(std::unique_lock<std::mutex>& lock);
  void start(std::unique_lock<std::mutex>& lock, Stream* stream);
  void complete(Stream* stream);
  void admit();
  void run_kernels(std::unique_lock<std::mutex>& lock);
  void end_kernels();
  void fail_kernel();
  void discard(int device);
  void nap(std::unique_lock<std::mutex>& lock);
  bool waits_for_word() const;
  bool fits(const Grid& grid, int device, unsigned blocks) const;
  unsigned cost(const Grid& grid) const;

  std::condition_variable work_, done_, callbacks_ready_;
  std::list<Stream> streams_;
  std::vector<Stream*> legacy_;      // of each device
  std::vector<cudaError_t> errors_;  // of each device: once a kernel has failed
  std::uint64_t sequence_ = 0;
  std::deque<Stream*> kernels_;     // streams whose task is a kernel that has begun, or waits for room, in order
  std::vector<unsigned> occupied_;  // threads, of each device
  std::deque<std::pair<Stream*, Payload*>> callbacks_;
  bool threads_started_ = false;
  std::unique_ptr<Scheduler> scheduler_;  // the device thread's
  std::uint64_t last_tick_ns_ = 0, last_writes_ = 0;
  int idle_rounds_ = 0;
};

// What a stream records between cudaStreamBeginCapture and cudaStreamEndCapture.
struct Capture {
  struct Node {
    int branch;
    Work work;
  };
  std::uint64_t id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id owner;
  Stream* origin = nullptr;
  std::vector<Stream*> streams;  // by branch; the origin is branch 0
  std::vector<Node> nodes;
  int num_events = 0;
  bool active = true, invalid = false;

  bool joined() const;  // whether all that was captured happens before the end of branch 0
};

// graph.cpp. To the stream's queue, or to its capture.
cudaError_t submit(Gpu& gpu, Stream* stream, Work work);
cudaError_t record(Gpu& gpu, const std::shared_ptr<EventState>& event, Stream* stream);
cudaError_t wait_event(Gpu& gpu, Stream* stream, const std::shared_ptr<EventState>& event);
// A call that any capture forbids invalidates that capture.
cudaError_t forbid_in_capture();
cudaError_t forbid_in_capture(Stream* stream);
void leave_capture(Stream* stream);  // it is destroyed

// memory.cpp
struct Range {
  std::uint64_t base, nbytes, id;
};
// The allocation of cudaMalloc around an address, in this process. To be called with the mutex of the GPU held.
bool find_allocation(std::uint64_t pointer, Range& range);

// runtime.cpp
cudaError_t note(cudaError_t error);  // for cudaGetLastError
cudaError_t usable();                 // whether there is a driver, a device, and no failed kernel
int current_device();
void count_call();  // of a function that does not ask whether the device is usable
// What most functions do: check that the device is usable, run `call` with the GPU and its lock, note the error.
template <typename Call>
cudaError_t locked(const Call& call) {
  if (const cudaError_t error = usable()) return note(error);
  Gpu& gpu = Gpu::get();
  std::unique_lock<std::mutex> lock(gpu.mutex);
  return note(call(gpu, lock));
}

}  // namespace ringcomm::emulator
