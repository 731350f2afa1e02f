#include "cuda/launch/request.h"

#include <algorithm>

#include "core/call/check.h"
#include "core/call/parts.h"

namespace ringcomm::cuda {

DeviceRequest::DeviceRequest(std::shared_ptr<Context> context, std::shared_ptr<Watcher> watcher,
                             std::shared_ptr<PendingCall> pending, Op op, std::int64_t limit_ms)
    : context_(std::move(context)),
      watcher_(std::move(watcher)),
      pending_(std::move(pending)),
      op_(op),
      limit_ms_(limit_ms),
      limit_(Clock::now() + std::chrono::milliseconds(limit_ms)) {}

bool DeviceRequest::done() const {
  if (pending_->open()) return context_->ended();
  if (pending_->failed() || ended_well_.load()) return true;
  try {
    const DeviceGuard guard(context_->device(), context_->rank());
    return reached(*pending_->end_event(), context_->rank());
  } catch (const Error&) {
    return true;  // wait() reports the error
  }
}

void DeviceRequest::conclude() {
  if (pending_->waits_for_ranks() && !ended_well_.load()) context_->check(op_);
  ended_well_.store(true);
}

void DeviceRequest::wait(std::int64_t timeout_ms) {
  const auto end = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (timeout_ms > 0 && end < limit_ && pending_->open() && !context_->ended()) {
    if (Clock::now() >= end) report_in_flight(op_, context_->rank(), timeout_ms);
    pending_->await(std::min(end, Clock::now() + kHeartbeat));
  }
  context_->await(*pending_, op_, limit_, limit_ms_);
  const DeviceGuard guard(context_->device(), context_->rank());
  const std::int64_t longest = timeout_ms > 0 ? timeout_ms : 2 * limit_ms_;
  const auto last = timeout_ms > 0 ? end : Clock::now() + std::chrono::milliseconds(longest) + kGrace;
  if (!poll_until(last, [&] { return reached(*pending_->end_event(), context_->rank()); }))
    report_in_flight(op_, context_->rank(), longest);
  conclude();
}

void DeviceRequest::join(std::uintptr_t stream) {
  context_->await(*pending_, op_, limit_, limit_ms_);
  if (pending_->waits_for_ranks()) context_->check(op_);
  const auto target = reinterpret_cast<cudaStream_t>(stream);
  const StreamEventPtr& event = pending_->end_event();
  if (!point_to_point(op_) && event && StreamEvents::is_of(target, *event, false))
    return;  // the driver is not asked anything
  const DeviceGuard guard(context_->device(), context_->rank());
  const unsigned long long capture = capture_of(target, context_->rank());
  if (point_to_point(op_))  // its event may be of the other end's device
    StreamEvents::follow(target, capture, event, context_->rank());
  else
    StreamEvents::follow_here(target, capture, event, false, context_->rank());
}

void DeviceRequest::on_done(std::function<void(std::exception_ptr)> callback) {
  if (done()) return callback(result());
  watcher_->watch(shared_from_this(), std::move(callback));
}

bool DeviceRequest::poll() {
  if (!pending_->open() || (Clock::now() < limit_ && !context_->ended())) return done();
  result();  // gives up, or learns that others have
  return true;
}

std::exception_ptr DeviceRequest::result() {
  try {
    context_->await(*pending_, op_, limit_, limit_ms_);
    const DeviceGuard guard(context_->device(), context_->rank());
    reached(*pending_->end_event(), context_->rank());
    conclude();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void Watcher::watch(std::shared_ptr<DeviceRequest> request, std::function<void(std::exception_ptr)> callback) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    items_.emplace_back(std::move(request), std::move(callback));
    if (!thread_.joinable() && !stopping_) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

void Watcher::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Watcher::sweep(std::unique_lock<std::mutex>& lock) {
  std::deque<Item> items;
  items.swap(items_);
  lock.unlock();
  std::deque<Item> left;
  bool any = false;
  for (auto& [request, callback] : items) {
    if (request->poll()) {
      callback(request->result());
      any = true;
    } else {
      left.emplace_back(std::move(request), std::move(callback));
    }
  }
  items.clear();
  lock.lock();
  items_.insert(items_.begin(), std::make_move_iterator(left.begin()), std::make_move_iterator(left.end()));
  return any;
}

// Querying an event makes a context on the usual device of a thread that has none.
void Watcher::run() {
  id_.store(std::this_thread::get_id());
  try {
    const DeviceGuard guard(device_, rank_);
    loop();
  } catch (const Error&) {
    loop();  // the device is lost; requests report it
  }
  id_.store(std::thread::id());
}

void Watcher::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (auto nap = std::chrono::microseconds(50); !stopping_ || !items_.empty();) {
    if (items_.empty()) {
      changed_.wait(lock, [this] { return stopping_ || !items_.empty(); });
    } else if (sweep(lock)) {
      nap = std::chrono::microseconds(50);
    } else {
      changed_.wait_for(lock, nap);
      nap = std::min(2 * nap, std::chrono::microseconds(1000));
    }
  }
}

}  // namespace ringcomm::cuda
