#include "core/work_queue.h"

#include <chrono>

#include "core/error.h"

namespace ringcomm {

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

void RequestBase::rethrow() const {
  if (error_) std::rethrow_exception(error_);
}

class WorkQueue::Item : public RequestBase {
 public:
  Item(WorkQueue& queue, Call call) : call_(std::move(call)), queue_(queue) {}

  void wait(std::int64_t timeout_ms) override {
    if (!done()) queue_.wait(*this, timeout_ms);
    rethrow();
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
  const Call& call() const { return call_; }

 private:
  const Call call_;
  WorkQueue& queue_;
};

void WorkQueue::let_go() {
  busy_.store(false);
  if (waiting_.load() == 0) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
  }  // a thread between its check and its wait must not miss this
  changed_.notify_all();
}

void WorkQueue::run(const Call& call) {
  if (waiting_.load() == 0 && !busy_.exchange(true)) {
    struct Release {
      WorkQueue& queue;
      ~Release() { queue.let_go(); }
    } release{*this};
    if (waiting_.load() == 0) return execute_(call);
  }
  submit(call)->wait();
}

std::shared_ptr<Request> WorkQueue::submit(Call call) {
  auto item = std::make_shared<Item>(*this, std::move(call));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) fail(ErrorCode::kInvalid, name(item->call().op), ": the communicator is closed; create a new one");
    items_.push_back(item);
    waiting_.fetch_add(1);
    if (!thread_.joinable()) thread_ = std::thread([this] { progress(); });
  }
  changed_.notify_all();
  return item;
}

// Executes the oldest item; the lock is held before and after, not during. Callbacks run when others may go on.
void WorkQueue::run_queued(std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<Item> item = std::move(items_.front());
  items_.pop_front();
  waiting_.fetch_sub(1);
  lock.unlock();
  const std::exception_ptr error = item->execute();
  let_go();
  item->finish(error);
  lock.lock();
  changed_.notify_all();
}

void WorkQueue::wait(Item& item, std::int64_t timeout_ms) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  std::unique_lock<std::mutex> lock(mutex_);
  waiting_.fetch_add(1);
  bool late = false;
  while (!item.done() && !late) {
    // With a limit of its own the waiter must not be caught in an execution that may take longer.
    if (timeout_ms <= 0 && !items_.empty() && !busy_.exchange(true))
      run_queued(lock);
    else if (timeout_ms > 0)
      late = changed_.wait_until(lock, end) == std::cv_status::timeout && !item.done();
    else
      changed_.wait(lock, [&] { return item.done() || (!items_.empty() && !busy_.load()); });
  }
  waiting_.fetch_sub(1);
  if (late)
    fail(ErrorCode::kTimeout, name(item.call().op), ": waited ", timeout_ms / 1000.0,
         " s for an asynchronous call, which is still in flight; wait longer, or abort the communicator");
}

void WorkQueue::progress() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_ || !items_.empty()) {
    if (!items_.empty() && !busy_.exchange(true))
      run_queued(lock);
    else
      changed_.wait(lock, [&] { return (stopping_ && items_.empty()) || (!items_.empty() && !busy_.load()); });
  }
}

void WorkQueue::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace ringcomm
