#include "core/pool.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <list>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/pieces.h"
#include "core/types.h"
#include "cuda/runtime.h"
#include "cuda/streams/events.h"

namespace ringcomm {

namespace cuda {
namespace {

constexpr std::size_t kPieceAlign = 512;  // whole sectors, whole vectors; cudaMalloc gives 256

class Pool {
 public:
  bool is_free() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !engine_;
  }

  void open(std::shared_ptr<Engine> engine, char* data, std::size_t nbytes, int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    engine_ = std::move(engine);
    data_ = data;
    nbytes_ = nbytes;
    device_ = device;
    rank_ = engine_->rank();
    pid_ = getpid();
    closed_ = has_said_ = false;
    pieces_ = std::make_unique<Pieces>(nbytes);
    in_graphs_.clear();
    events_ = std::make_shared<StreamEvents>(device);
  }

  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }

  // Returns the memory to the engine if nobody uses it any more, and then hands over the engine.
  std::shared_ptr<Engine> give_back() noexcept try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!usable() || !closed_) return nullptr;
    const DeviceGuard guard(device_, rank_);
    reclaim();
    if (!pieces_->taken().empty()) return nullptr;
    events_.reset();
    engine_->release(data_);
    return std::exchange(engine_, nullptr);
  } catch (const std::exception&) {
    return nullptr;  // the context is lost, and the memory with it
  }

  void* allocate(std::size_t nbytes, int device, cudaStream_t stream) noexcept try {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!usable() || closed_) return nullptr;
    if (device != device_) return say(concat("requests for cuda:", device_, ", got one for cuda:", device));
    const DeviceScope on(device_, rank_);
    if (nbytes <= nbytes_) {
      const std::size_t rounded = round_up(std::max<std::size_t>(nbytes, 1), kPieceAlign);
      for (;;) {
        reclaim();
        if (const auto offset = pieces_->take(rounded)) {
          if (capture_of(stream, rank_)) in_graphs_.insert(*offset);
          return data_ + *offset;
        }
        if (freed_.empty()) break;
        const StreamEventPtr event = freed_.front().event;
        const std::shared_ptr<StreamEvents> events = events_;
        const int rank = rank_;
        // The stream may wait for a rank whose thread comes to this pool first, in give_back_pools.
        lock.unlock();
        check(cudaEventSynchronize(event->handle), "cudaEventSynchronize", rank);
        lock.lock();
        if (!usable() || closed_ || events_ != events) return nullptr;
      }
    }
    std::size_t used = 0;
    for (const auto& [offset, taken] : pieces_->taken()) used += taken;
    return say(
        concat("room for ", nbytes, " bytes in one piece, got none beside ", used, " bytes in use of ", nbytes_));
  } catch (const std::exception& error) {
    return say(error.what());
  }

  // The stream's last work on the piece has been enqueued before.
  void free(void* data, cudaStream_t stream) noexcept try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!usable()) return;
    const auto offset = static_cast<std::size_t>(static_cast<char*>(data) - data_);
    if (pieces_->taken().count(offset) == 0) {
      say(concat("memory of this pool to be freed, got ", data));
      return;
    }
    const DeviceGuard guard(device_, rank_);
    // A graph uses the piece at every launch, on any stream: such a piece stays taken.
    if (in_graphs_.count(offset) || capture_of(stream, rank_)) return;
    freed_.push_back({offset, events_->record(stream, 0, rank_)});
  } catch (const std::exception& error) {
    say(error.what());
  }

 private:
  struct FreeMemory {
    std::size_t offset;
    StreamEventPtr event;
  };

  // A forked child has neither the device nor the memory.
  bool usable() const { return engine_ && pid_ == getpid() && !process_is_ending(); }

  void reclaim() {
    for (auto freed = freed_.begin(); freed != freed_.end();) {
      const auto here = freed++;
      if (!reached(*here->event, rank_)) continue;
      pieces_->give_back(here->offset);
      freed_.erase(here);
    }
  }

  // Printed once for each pool: the framework reports that memory is out, but not which pool.
  void* say(const std::string& what) noexcept {
    if (!std::exchange(has_said_, true))
      std::fprintf(stderr,
                   "ringcomm: mem_pool: rank %d expected %s; the framework now frees what it caches and asks again, or "
                   "says that memory is out: give mem_pool more bytes\n",
                   rank_, what.c_str());
    return nullptr;
  }

  std::mutex mutex_;
  std::shared_ptr<Engine> engine_;  // null: there is no such pool
  char* data_ = nullptr;
  std::size_t nbytes_ = 0;
  int device_ = 0, rank_ = 0, pid_ = 0;
  bool closed_ = false, has_said_ = false;
  std::unique_ptr<Pieces> pieces_;
  std::set<std::size_t> in_graphs_;  // pieces that were allocated while their stream was captured
  std::shared_ptr<StreamEvents> events_;
  std::list<FreeMemory> freed_;  // freed by the framework, but the device may still use them
};

// kMaxPools of them. Never destroyed: frameworks free memory while static objects are destroyed.
Pool* all_pools() {
  static Pool* const all = new Pool[kMaxPools];
  return all;
}

}  // namespace
}  // namespace cuda

int open_pool(const std::shared_ptr<Engine>& engine, std::size_t nbytes, int device) {
  give_back_pools();
  nbytes = round_up(std::max<std::size_t>(nbytes, 1), cuda::kPieceAlign);
  char* const data = static_cast<char*>(engine->allocate(nbytes));
  static std::mutex opening;
  const std::lock_guard<std::mutex> lock(opening);
  for (int number = 0; number < kMaxPools; ++number) {
    cuda::Pool& pool = cuda::all_pools()[number];
    if (!pool.is_free()) continue;
    pool.open(engine, data, nbytes, device);
    return number;
  }
  engine->release(data);
  fail(ErrorCode::kSystem, "mem_pool: rank ", engine->rank(), " expected fewer than ", kMaxPools,
       " pools in this process, got as many; drop one, and all memory of it");
}

void close_pool(int number) {
  cuda::all_pools()[number].close();
  give_back_pools();
}

// If the pool held an engine last, a thread of its own destroys the engine: that waits for the device, where a kernel
// may be waiting for a rank of this thread.
void give_back_pools() {
  for (int number = 0; number < kMaxPools; ++number)
    if (std::shared_ptr<Engine> engine = cuda::all_pools()[number].give_back())
      std::thread([last = std::move(engine)]() mutable { last.reset(); }).detach();
}

}  // namespace ringcomm

// clang-format off
#define RINGCOMM_POOLS(X) \
  X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) \
  X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23) X(24) X(25) X(26) X(27) X(28) X(29) X(30) X(31)
// clang-format on
#define RINGCOMM_EXPORTED extern "C" __attribute__((visibility("default")))
#define RINGCOMM_POOL(N)                                                                               \
  static_assert(N < ringcomm::kMaxPools, "a pool for each pair of functions");                         \
  RINGCOMM_EXPORTED void* ringcomm_pool_allocate_##N(std::size_t nbytes, int device, void* stream) {   \
    return ringcomm::cuda::all_pools()[N].allocate(nbytes, device, static_cast<cudaStream_t>(stream)); \
  }                                                                                                    \
  RINGCOMM_EXPORTED void ringcomm_pool_free_##N(void* data, std::size_t, int, void* stream) {          \
    if (data) ringcomm::cuda::all_pools()[N].free(data, static_cast<cudaStream_t>(stream));            \
  }
RINGCOMM_POOLS(RINGCOMM_POOL)
