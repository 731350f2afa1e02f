// Runs one rank's collectives one at a time in the order of their calls: in the caller's thread if the queue is empty,
// else in the first free thread: the progress thread, or one that waits. The progress thread lets a small call wait for
// a moment, because waking that thread takes longer than the call: a caller that soon waits then executes it itself.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/engine.h"
#include "runtime/forks.h"
#include "runtime/interrupt.h"

namespace ringcomm {

// The state that every request has; the end of the call is announced once.
class RequestBase : public Request {
 public:
  bool done() const override { return done_.load(std::memory_order_acquire); }
  void on_done(std::function<void(std::exception_ptr)> callback) override;
  int source() const override { return source_; }

 protected:
  // Throws in a forked child: the thread that would end the call exists in the parent only.
  void refuse_in_child(Op op) const;
  void finish(std::exception_ptr error);
  void rethrow() const;

  int source_ = -1;

 private:
  const int forks_ = forks_so_far();
  std::atomic<bool> done_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
  std::vector<std::function<void(std::exception_ptr)>> callbacks_;
};

// Called regularly while a thread waits for a call that another thread executes; `has_come` says whether it has ended.
using Watch = std::function<void(const std::function<bool()>& has_come)>;

class WorkQueue {
 public:
  // `stop` makes the executing call end soon, because a signal handler wants a waiting caller to go on.
  // `polls_signals`: executions poll for signals themselves; if not, a thread that handles signals leaves executions to
  // another thread. `small_bytes`: up to this size of one rank's part a call is small. `watch`: makes a Watch for each
  // wait without a time limit of its own; may be null.
  WorkQueue(std::function<void(const Call&)> execute, std::function<void(const char*)> stop, bool polls_signals,
            std::size_t small_bytes = 0, std::function<Watch()> watch = nullptr)
      : execute_(std::move(execute)),
        stop_(std::move(stop)),
        polls_signals_(polls_signals),
        small_bytes_(small_bytes),
        watch_(std::move(watch)) {}
  ~WorkQueue() { stop(); }

  void run(const Call& call);
  std::shared_ptr<Request> submit(Call call);
  // Executes queued calls now, even small ones, because a caller waits that cannot execute them.
  void start_now();
  bool idle() const { return waiting_.load() == 0 && !busy_.load(); }
  // Call queued() before executes(): an item that leaves the queue is executing by then.
  std::size_t queued() const { return queued_.load(); }
  bool executes() const { return busy_.load(); }
  bool runs_this_thread() const { return thread_.get_id() == std::this_thread::get_id(); }
  // Lets the progress thread finish the queue, and ends it. If a signal handler calls this inside a wait, the call in
  // flight is aborted.
  void stop();

 private:
  class Item;

  bool is_small(const Call& call) const;
  void run_queued(std::unique_lock<std::mutex>& lock);
  using Clock = std::chrono::steady_clock;
  enum class WaitResult : std::uint8_t { kDone, kLate, kInterrupted };

  std::shared_ptr<Item> enqueue(Call call);
  bool executes_in_this_thread() const;
  // Whether this thread may execute.
  bool may_execute() const;
  // With `helps` this thread may execute queued calls during the wait, however long they take.
  WaitResult await(const Item& item, Clock::time_point end, bool helps);
  void wait(Item& item, std::int64_t timeout_ms);
  void progress();
  // Makes the progress thread execute what is queued without a delay. The lock is held.
  void start_queued();
  bool take();
  void let_go();
  void refuse_from_inside(const Call& call) const;

  const std::function<void(const Call&)> execute_;
  const std::function<void(const char*)> stop_;
  const bool polls_signals_;
  const std::size_t small_bytes_;
  const std::function<Watch()> watch_;
  std::atomic<bool> busy_{false};          // a thread is executing
  std::atomic<std::thread::id> runner_{};  // that thread
  SignalHandling signals_;
  std::atomic<int> waiting_{0};  // queued items, and threads blocked on the condition
  std::atomic<std::size_t> queued_{0};
  std::mutex mutex_;
  std::condition_variable changed_;    // for threads that wait for an item
  std::condition_variable queued_up_;  // for the progress thread
  bool on_timer_ = false;              // the progress thread looks at the queue soon without being woken
  Clock::time_point start_at_{};       // before that time the progress thread leaves queued items to waiting callers
  std::deque<std::shared_ptr<Item>> items_;
  std::thread thread_;
  bool stopping_ = false;
};

}  // namespace ringcomm
