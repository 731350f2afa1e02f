#include "runtime/progress/work_queue.h"

#include <algorithm>
#include <chrono>

#include "core/error.h"
#include "core/scope_exit.h"
#include "runtime/observe/flight_recorder.h"
#include "runtime/observe/site.h"
#include "runtime/observe/trace.h"

namespace ringcomm {

namespace {
constexpr auto kLookEvery = std::chrono::milliseconds(50);  // how often a wait polls for signals
constexpr auto kDelay = std::chrono::microseconds(100);     // how long a small call waits for a caller to execute it
}  // namespace

void RequestBase::on_done(std::function<void(std::exception_ptr)> callback) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback(error_);
}

void RequestBase::finish(std::exception_ptr error) {
  std::vector<std::function<void(std::exception_ptr)>> callbacks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = error;
    callbacks.swap(callbacks_);
    done_.store(true, std::memory_order_release);
  }
  for (auto& callback : callbacks) callback(error);
}

void RequestBase::refuse_in_child(Op op) const {
  if (forks_ == forks_so_far()) return;
  fail(ErrorCode::kInvalid, name(op),
       ": was waited for in a process forked after it began; wait in the parent, and make a communicator in the child, "
       "or start it with spawn");
}

void RequestBase::rethrow() const {
  if (error_) std::rethrow_exception(error_);
}

class WorkQueue::Item : public RequestBase {
 public:
  Item(WorkQueue& queue, Call call) : call_(std::move(call)), queue_(queue) {}

  void wait(std::int64_t timeout_ms) override {
    if (!done()) {
      refuse_in_child(call_.op);
      queue_.wait(*this, timeout_ms);
    }
    rethrow();
  }
  void start_now() override {
    if (done()) return;
    refuse_in_child(call_.op);
    queue_.start_now();
  }
  std::exception_ptr execute() const {
    try {
      queue_.execute_(call_);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  using RequestBase::finish;
  using RequestBase::rethrow;
  const Call& call() const { return call_; }

 private:
  const Call call_;
  WorkQueue& queue_;
};

bool WorkQueue::take() {
  if (busy_.exchange(true)) return false;
  runner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  return true;
}

void WorkQueue::let_go() {
  runner_.store({}, std::memory_order_relaxed);
  busy_.store(false);
  if (waiting_.load() == 0) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);  // a thread between its check and its wait must not miss this
    if (!items_.empty() && !on_timer_) queued_up_.notify_one();
  }
  changed_.notify_all();
}

// A signal handler runs inside the waiting call. A call from the handler might make the waiting call wait for ever, or
// the order of calls would depend on the time of the signal.
void WorkQueue::refuse_from_inside(const Call& call) const {
  if (!executes_in_this_thread() && !signals_.runs_this()) return;
  fail(ErrorCode::kInvalid, name(call.op),
       ": was called inside another call of this communicator, by a signal's handler, expected after it; set a flag in "
       "the handler, and call when that one has returned");
}

bool WorkQueue::executes_in_this_thread() const {
  return runner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
}

bool WorkQueue::may_execute() const { return polls_signals_ || !interruptible(); }

void WorkQueue::run(const Call& call) {
  if (busy_.load(std::memory_order_relaxed) || waiting_.load() != 0) refuse_from_inside(call);
  if (waiting_.load() == 0 && may_execute() && take()) {
    const ScopeExit release([this] { let_go(); });
    if (waiting_.load() == 0) return execute_(call);
  }
  enqueue(call)->wait(0);
}

bool WorkQueue::is_small(const Call& call) const {
  return call.input_parts.empty() && call.output_parts.empty() &&
         call.count <= small_bytes_ / element_bytes(call.dtype) && small_bytes_ != 0;
}

void WorkQueue::start_queued() {
  start_at_ = {};
  queued_up_.notify_one();
}

void WorkQueue::start_now() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!items_.empty()) start_queued();
}

std::shared_ptr<WorkQueue::Item> WorkQueue::enqueue(Call call) {
  if (!call.site) call.site = site_here();  // another thread may execute it
  UnlocatedCalls::place(call.site);
  auto item = std::make_shared<Item>(*this, std::move(call));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) fail(ErrorCode::kInvalid, name(item->call().op), ": the communicator is closed; create a new one");
    if (!is_small(item->call()))
      start_queued();
    else if (items_.empty())
      start_at_ = Clock::now() + kDelay;
    items_.push_back(item);
    waiting_.fetch_add(1);
    queued_.fetch_add(1);
    if (!thread_.joinable()) thread_ = std::thread([this] { progress(); });
    if (!on_timer_) queued_up_.notify_one();
  }
  changed_.notify_all();
  return item;
}

std::shared_ptr<Request> WorkQueue::submit(Call call) { return enqueue(std::move(call)); }

// Executes the oldest item. The lock is held before and after, but not during the execution. Callbacks run only once
// other threads may execute again.
void WorkQueue::run_queued(std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<Item> item = std::move(items_.front());
  items_.pop_front();
  waiting_.fetch_sub(1);
  queued_.fetch_sub(1);
  lock.unlock();
  const std::exception_ptr error = item->execute();
  let_go();
  item->finish(error);
  lock.lock();
  changed_.notify_all();
}

WorkQueue::WaitResult WorkQueue::await(const Item& item, Clock::time_point end, bool helps) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!helps) start_queued();
  waiting_.fetch_add(1);
  WaitResult waited = WaitResult::kDone;
  Watch watch;
  while (!item.done() && waited == WaitResult::kDone) {
    if (helps && !items_.empty() && take()) {
      watch = nullptr;
      run_queued(lock);
      continue;
    }
    changed_.wait_until(lock, std::min(Clock::now() + kLookEvery, end),
                        [&] { return item.done() || (helps && !items_.empty() && !busy_.load()); });
    if (item.done()) break;
    if (Clock::now() >= end) waited = WaitResult::kLate;
    if (watch_ && end == Clock::time_point::max()) {
      lock.unlock();
      if (!watch) watch = watch_();
      watch([&] { return item.done(); });
      lock.lock();
    }
    if (!interruptible()) continue;
    lock.unlock();
    if (signals_.interrupted()) waited = WaitResult::kInterrupted;
    lock.lock();
  }
  waiting_.fetch_sub(1);
  return waited;
}

// A waiter with a time limit must not execute a call, which may take longer. A waiter that a signal interrupts aborts
// the call for all ranks, and waits until the call has ended, because only then may the caller reuse its buffers.
void WorkQueue::wait(Item& item, std::int64_t timeout_ms) {
  refuse_from_inside(item.call());
  const bool limited = timeout_ms > 0;
  const auto end = limited ? Clock::now() + std::chrono::milliseconds(timeout_ms) : Clock::time_point::max();
  WaitResult waited = await(item, end, !limited && may_execute());
  if (waited == WaitResult::kLate)
    fail(ErrorCode::kTimeout, name(item.call().op), ": waited ", timeout_ms / 1000.0,
         " s for an asynchronous call, which is still in flight; wait longer, or abort the communicator");
  if (waited == WaitResult::kDone) return;
  while (waited == WaitResult::kInterrupted) {
    stop_(name(item.call().op));
    waited = await(item, Clock::time_point::max(), false);
  }
  item.rethrow();
  fail(ErrorCode::kAborted, name(item.call().op), ": was interrupted by a signal");
}

void WorkQueue::progress() {
  trace::set_role("collectives");
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_ || !items_.empty()) {
    const bool delays = !stopping_ && Clock::now() < start_at_;
    if (!items_.empty() && !delays && take()) {
      run_queued(lock);
      continue;
    }
    on_timer_ = delays;
    if (delays)
      queued_up_.wait_until(lock, Clock::time_point(start_at_));
    else
      queued_up_.wait(lock, [&] { return items_.empty() ? stopping_ : !busy_.load() || Clock::now() < start_at_; });
    on_timer_ = false;
  }
}

// A signal handler that closes the communicator runs inside a call. If another thread executes that call, the call
// ends. If this thread executes it, queued calls cannot begin before the handler returns, so they fail.
void WorkQueue::stop() {
  std::deque<std::shared_ptr<Item>> never;
  if (signals_.runs_this()) stop_("close");
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (executes_in_this_thread()) {
      never.swap(items_);
      waiting_.fetch_sub(static_cast<int>(never.size()));
      queued_.fetch_sub(never.size());
    }
  }
  for (const auto& item : never) {
    const char* why = ": the communicator was closed by a signal's handler before this call began; create a new one";
    item->finish(std::make_exception_ptr(Error(ErrorCode::kAborted, concat(name(item->call().op), why))));
  }
  queued_up_.notify_one();
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace ringcomm
