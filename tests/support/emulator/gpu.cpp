#include "gpu.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace ringcomm::emulator {
namespace {

constexpr std::uint64_t kBudget = 1024;     // switches between two looks at the queues
constexpr std::uint64_t kTickNs = 200'000;  // spinning threads look again: the host and other processes write flags too
constexpr int kYields = 20;                 // when all threads spin: first yield so often, then sleep
constexpr unsigned kLeastThreads = 64;      // a smaller block takes as much room

long number(const char* name, long fallback) {
  const char* const text = std::getenv(name);
  if (!text || !*text) return fallback;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (!*end && value >= 0) return value;
  std::fprintf(stderr, "ringcomm emulator: %s must be a number >= 0, got '%s'\n", name, text);
  std::abort();
}

// The following run in a stream's context, and touch none of the device thread's data.

void call_payload(void* payload) {
  auto& p = *static_cast<Payload*>(payload);
  acquire(&p.sync);
  p.call();
}
void pass_on(void* payload) {  // to the thread of host functions
  auto& p = *static_cast<Payload*>(payload);
  acquire(&p.sync);
  release(&p.sync);
}
void join_payload(void* payload) { acquire(&static_cast<Payload*>(payload)->sync); }
void look_at_word(void* at) { __atomic_load_n(static_cast<std::uint32_t*>(at), __ATOMIC_ACQUIRE); }
void delete_payload(void* payload) { delete static_cast<Payload*>(payload); }
void begin_grid(void* grid) {
  static_cast<Grid*>(grid)->join();
  static_cast<Grid*>(grid)->before_start();
}
void end_grid(void* grid) {
  static_cast<Grid*>(grid)->after_end();
  delete static_cast<Grid*>(grid);
}

}  // namespace

Config Config::from_environment() {
  Config c{};
  c.no_driver = number("RINGCOMM_EMULATED_NO_DRIVER", 0) != 0;
  c.no_mps = number("RINGCOMM_EMULATED_NO_MPS", 0) != 0;
  c.no_mem_ops = number("RINGCOMM_EMULATED_NO_MEM_OPS", 0) != 0;
  c.no_peer = number("RINGCOMM_EMULATED_NO_PEER", 0) != 0;
  c.devices = static_cast<int>(number("RINGCOMM_EMULATED_DEVICES", 1));
  c.sms = static_cast<int>(number("RINGCOMM_EMULATED_SMS", 8));
  c.sm_threads = static_cast<int>(number("RINGCOMM_EMULATED_SM_THREADS", 2048));
  c.seed = static_cast<std::uint64_t>(number("RINGCOMM_EMULATED_SEED", 0));
  c.preempt_every = static_cast<unsigned>(number("RINGCOMM_EMULATED_PREEMPT", 0));
  c.copy_us = static_cast<unsigned>(number("RINGCOMM_EMULATED_COPY_US", 0));
  return c;
}

Gpu::Gpu() : config(Config::from_environment()) {
  errors_.resize(config.devices, cudaSuccess);
  occupied_.resize(config.devices, 0);
  for (int d = 0; d < config.devices; ++d) {
    legacy_.push_back(create_stream(d, cudaStreamDefault));
    legacy_.back()->legacy = true;
  }
}
Gpu& Gpu::get() {
  static Gpu* const gpu = new Gpu;  // never destroyed: its threads run until the process ends
  return *gpu;
}

// ---- called by the runtime API --------------------------------------------------------------------------------------

Stream* Gpu::resolve(cudaStream_t handle, int device) {
  if (!handle || handle == cudaStreamLegacy) return legacy_[device];
  for (Stream& stream : streams_)
    if (&stream == handle && !stream.destroyed && !stream.legacy) return handle;
  return nullptr;
}
Stream* Gpu::create_stream(int device, unsigned flags) {
  Stream& stream = streams_.emplace_back();
  stream.device = device;
  stream.flags = flags;
  stream.context = new_context();
  return &stream;
}
void Gpu::destroy(Stream* stream) {
  stream->destroyed = true;
  if (threads_started_)
    work_.notify_one();  // the device thread removes it, once its work is done
  else
    streams_.remove_if([&](const Stream& s) { return &s == stream; });
}

void Gpu::enqueue(Stream* stream, const Work& work) {
  Task task{work.kind};
  task.sequence = ++sequence_;
  task.cooperative = work.cooperative;
  task.other_device = stream->legacy ? work.other_device : -1;
  if (work.kind == Kind::kKernel) {
    task.grid = new Grid(work.name, work.body, work.grid, work.block);
    task.grid->before_start();
  } else if (work.kind == Kind::kCall || work.kind == Kind::kHost) {
    task.payload = new Payload{work.call};
    release(&task.payload->sync);
  } else {
    task.point = work.point;
    task.word = work.word;
  }
  stream->tasks.push_back(std::move(task));
  if (!threads_started_) {
    threads_started_ = true;
    std::thread([this] { device_thread(); }).detach();
    std::thread([this] { callback_thread(); }).detach();
  }
  work_.notify_one();
}

bool Gpu::idle(const Stream* stream) const {
  if (!stream->tasks.empty()) return false;
  if (!stream->legacy) return true;
  return std::all_of(streams_.begin(), streams_.end(),
                     [&](const Stream& s) { return s.device != stream->device || !s.blocking() || s.tasks.empty(); });
}
void Gpu::wait(std::unique_lock<std::mutex>& lock, Stream* stream) {
  if (stream->legacy) enqueue(stream, {Kind::kCall, {}, {}, {}, {}, false, [] {}});  // behind all blocking streams
  const std::uint64_t last = sequence_;
  done_.wait(lock, [&] { return stream->tasks.empty() || stream->tasks.front().sequence > last; });
  acquire(&stream->sync);
}
void Gpu::wait(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Point>& point) {
  done_.wait(lock, [&] { return point->reached; });
  acquire(&point->sync);
}
void Gpu::wait_device(std::unique_lock<std::mutex>& lock, int device) {
  const std::uint64_t last = sequence_;
  const auto busy = [&](const Stream& s) {
    return s.device == device && !s.tasks.empty() && s.tasks.front().sequence <= last;
  };
  done_.wait(lock, [&] { return std::none_of(streams_.begin(), streams_.end(), busy); });
  for (Stream& stream : streams_)
    if (stream.device == device) acquire(&stream.sync);
}

int Gpu::most_resident(unsigned block_threads) const {
  return config.sm_threads / static_cast<int>(std::max(block_threads, kLeastThreads));
}
unsigned Gpu::cost(const Grid& grid) const { return std::max(grid.threads(), kLeastThreads); }
bool Gpu::fits(const Grid& grid, int device, unsigned blocks) const {
  const auto room = static_cast<unsigned>(config.sms * most_resident(grid.threads())) * cost(grid);
  return occupied_[device] + blocks * cost(grid) <= room;
}

// ---- the device thread ----------------------------------------------------------------------------------------------

void Gpu::device_thread() {
  std::unique_lock<std::mutex> lock(mutex);
  scheduler_ = std::make_unique<Scheduler>(config.seed, config.preempt_every);
  for (;;) {
    const bool some = start_tasks(lock);
    admit();
    if (scheduler_->has_blocks())
      run_kernels(lock);
    else if (!some && waits_for_word())  // which other processes write too
      work_.wait_for(lock, std::chrono::nanoseconds(kTickNs));
    else if (!some)
      work_.wait(lock);
  }
}

bool Gpu::waits_for_word() const {
  return std::any_of(streams_.begin(), streams_.end(),
                     [](const Stream& s) { return !s.tasks.empty() && s.tasks.front().kind == Kind::kWaitWord; });
}

// A copy between two devices on a legacy stream waits for all earlier work of both devices, and their later work for
// it.
bool Gpu::may_copy(const Stream& stream) const {
  const Task& task = stream.tasks.front();
  if (task.other_device >= 0)
    for (const Stream& s : streams_)
      if ((s.device == stream.device || s.device == task.other_device) && !s.tasks.empty() &&
          s.tasks.front().sequence < task.sequence)
        return false;
  for (const Stream* legacy : legacy_)
    for (const Task& copy : legacy->tasks)
      if (copy.other_device >= 0 && copy.sequence < task.sequence &&
          (stream.device == legacy->device || stream.device == copy.other_device))
        return false;
  return true;
}

// The legacy stream and the blocking streams of its device wait for each other.
bool Gpu::may_start(const Stream& stream) const {
  const Task& task = stream.tasks.front();
  if (task.started) return task.finished;
  if (task.kind == Kind::kWait && !task.point->reached) return false;
  if (task.kind == Kind::kWaitWord && !task.word.reached()) return false;
  if (!may_copy(stream)) return false;
  const auto before = [&](const Stream& s) { return !s.tasks.empty() && s.tasks.front().sequence < task.sequence; };
  if (stream.blocking()) return !before(*legacy_[stream.device]);
  return !stream.legacy || std::none_of(streams_.begin(), streams_.end(), [&](const Stream& s) {
    return s.device == stream.device && s.blocking() && before(s);
  });
}

bool Gpu::start_tasks(std::unique_lock<std::mutex>& lock) {
  bool any = false;
  for (auto stream = streams_.begin(); stream != streams_.end();) {
    if (!stream->tasks.empty() && may_start(*stream)) {
      start(lock, &*stream);
      any = true;
    }
    const auto next = std::next(stream);
    if (stream->destroyed && stream->tasks.empty()) {
      in_context(stream->context, &release, &legacy_[stream->device]->sync);
      free_context(stream->context);
      streams_.erase(stream);
    }
    stream = next;
  }
  return any;
}

void Gpu::start(std::unique_lock<std::mutex>& lock, Stream* stream) {
  Task& task = stream->tasks.front();
  void* const context = stream->context;
  if (!task.started) {
    if (stream->blocking()) in_context(context, &acquire, &legacy_[stream->device]->sync);
    if (stream->legacy)
      for (Stream& s : streams_)
        if (s.device == stream->device && s.blocking()) in_context(context, &acquire, &s.sync);
  }
  const bool first = !task.started;
  task.started = true;
  switch (task.kind) {
    case Kind::kKernel:
      in_context(context, &begin_grid, task.grid);
      kernels_.push_back(stream);
      return;
    case Kind::kCall: {
      Payload* const payload = task.payload;
      lock.unlock();  // callers may queue more meanwhile
      in_context(context, &call_payload, payload);
      lock.lock();
      break;
    }
    case Kind::kHost:
      if (first) {
        in_context(context, &pass_on, task.payload);
        callbacks_.emplace_back(stream, task.payload);
        callbacks_ready_.notify_one();
        return;
      }
      in_context(context, &join_payload, task.payload);
      break;
    case Kind::kRecord:
      in_context(context, &release, &task.point->sync);
      task.point->reached = true;
      task.point->at_ns = global_timer_ns();
      break;
    case Kind::kWait:
      in_context(context, &acquire, &task.point->sync);
      break;
    case Kind::kWaitWord:
      in_context(context, &look_at_word, task.word.at);
      break;
  }
  complete(stream);
}

void Gpu::complete(Stream* stream) {
  const Task task = std::move(stream->tasks.front());
  stream->tasks.pop_front();
  if (task.payload) in_context(stream->context, &delete_payload, task.payload);
  if (task.grid) in_context(stream->context, &end_grid, task.grid);
  in_context(stream->context, &release, &stream->sync);
  done_.notify_all();
}

// In order: a kernel that waits for room makes later ones of its device wait too.
void Gpu::admit() {
  std::vector<bool> full(config.devices, false);
  for (Stream* const stream : kernels_) {
    const Task& task = stream->tasks.front();
    Grid& grid = *task.grid;
    const int device = stream->device;
    if (full[device] || grid.left() == 0) continue;
    const unsigned count = task.cooperative ? grid.left() : 1;
    while (grid.left() > 0 && fits(grid, device, count)) {
      for (unsigned i = 0; i < count; ++i) scheduler_->start_block(&grid);
      occupied_[device] += count * cost(grid);
    }
    full[device] = grid.left() > 0;
  }
}

void Gpu::run_kernels(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  const Scheduler::Pause pause = scheduler_->run(kBudget);
  lock.lock();
  if (scheduler_->writes() != last_writes_) idle_rounds_ = 0;
  last_writes_ = scheduler_->writes();
  switch (pause) {
    case Scheduler::Pause::kBlockEnded:
      end_kernels();
      break;
    case Scheduler::Pause::kFailed:
      fail_kernel();
      break;
    case Scheduler::Pause::kParked:
      nap(lock);
      break;
    case Scheduler::Pause::kBudget:
      if (global_timer_ns() - last_tick_ns_ < kTickNs) break;
      scheduler_->wake_spinners();
      last_tick_ns_ = global_timer_ns();
      break;
  }
}

void Gpu::nap(std::unique_lock<std::mutex>& lock) {
  if (++idle_rounds_ <= kYields) {
    lock.unlock();
    sched_yield();
    lock.lock();
  } else {
    work_.wait_for(lock, std::chrono::microseconds(idle_rounds_ < 10 * kYields ? 50 : 200));
  }
  scheduler_->wake_spinners();
  last_tick_ns_ = global_timer_ns();
}

void Gpu::end_kernels() {
  std::fill(occupied_.begin(), occupied_.end(), 0u);
  std::deque<Stream*> kernels;
  kernels.swap(kernels_);
  for (Stream* const stream : kernels) {
    const Grid& grid = *stream->tasks.front().grid;
    if (grid.finished()) {
      complete(stream);
      continue;
    }
    occupied_[stream->device] += grid.resident() * cost(grid);
    kernels_.push_back(stream);
  }
}

// As on a device: nothing works on it any more, in this process.
void Gpu::fail_kernel() {
  std::fprintf(stderr, "ringcomm emulator: a kernel failed. %s", scheduler_->failure().c_str());
  for (Stream* const stream : kernels_)
    if (stream->tasks.front().grid == scheduler_->failed_grid()) {
      errors_[stream->device] = cudaErrorLaunchFailure;
      discard(stream->device);
      break;
    }
  end_kernels();
}
void Gpu::discard(int device) {
  for (Stream& stream : streams_) {
    if (stream.device != device) continue;
    const auto running = std::find(kernels_.begin(), kernels_.end(), &stream);
    if (running != kernels_.end()) {
      scheduler_->abandon(stream.tasks.front().grid);
      kernels_.erase(running);
    } else if (!stream.tasks.empty() && stream.tasks.front().kind == Kind::kHost && stream.tasks.front().started) {
      continue;  // the host function still runs
    }
    while (!stream.tasks.empty()) {
      if (stream.tasks.front().kind == Kind::kRecord) stream.tasks.front().point->reached = true;
      complete(&stream);
    }
  }
}

void Gpu::callback_thread() {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    callbacks_ready_.wait(lock, [&] { return !callbacks_.empty(); });
    const auto [stream, payload] = callbacks_.front();
    callbacks_.pop_front();
    lock.unlock();
    acquire(&payload->sync);
    payload->call();
    release(&payload->sync);
    lock.lock();
    stream->tasks.front().finished = true;
    work_.notify_one();
  }
}

}  // namespace ringcomm::emulator
