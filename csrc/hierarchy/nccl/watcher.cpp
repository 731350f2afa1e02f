#include "hierarchy/nccl/watcher.h"

#include "core/error.h"

namespace ringcomm::nccl {

namespace {
constexpr auto kTick = std::chrono::milliseconds(1);
constexpr auto kNotBegun = TransportClock::time_point::max();
}  // namespace

Watcher::Watcher(const Place& place, std::shared_ptr<AbortState> abort_state, std::function<bool()> tick)
    : place_(place), abort_state_(std::move(abort_state)), tick_(std::move(tick)) {}

void Watcher::watch(WatchedWork watched) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return;
    all_.push_back(std::move(watched));
  }
  wake();
}

void Watcher::call_back(std::function<bool()> look) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    looks_.push_back(std::move(look));
  }
  wake();
}

void Watcher::wake() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return;
    awake_ = true;
    if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->run(); });
  }
  changed_.notify_all();
}

bool Watcher::idle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return all_.empty() && !sweeping_;
}

void Watcher::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (!thread_.joinable()) return;
  if (runs_this_thread())
    thread_.detach();  // it ends once this call has returned, and holds a reference to the watcher
  else
    thread_.join();
}

void Watcher::run() {
  id_.store(std::this_thread::get_id());
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (all_.empty() && looks_.empty() && !awake_) {
      changed_.wait(lock);
      continue;
    }
    awake_ = false;
    lock.unlock();
    bool more = false;
    sweep();  // first: differing signatures explain more than NCCL's error for the messages after them
    try {
      more = tick_();
    } catch (const TransportFailure& failure) {
      abort_state_->fail(failure);
    } catch (const Error& error) {
      abort_state_->fail({-1, false, error.what()});
    }
    look_back();
    lock.lock();
    awake_ = awake_ || more;
    if (!stopping_ && (awake_ || !all_.empty() || !looks_.empty()))
      changed_.wait_for(lock, kTick, [this] { return stopping_; });
  }
  lock.unlock();
  look_back();
  id_.store(std::thread::id());
}

void Watcher::look_back() {
  std::list<std::function<bool()>> mine;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    mine.swap(looks_);
  }
  mine.remove_if([](const std::function<bool()>& look) { return look(); });
  const std::lock_guard<std::mutex> lock(mutex_);
  looks_.splice(looks_.begin(), mine);
}

// Does not hold the lock while it checks: the handler of an end may call back.
void Watcher::sweep() {
  std::list<WatchedWork> mine;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    mine.swap(all_);
    sweeping_ = true;
  }
  for (auto watched = mine.begin(); watched != mine.end();)
    watched = abort_state_->ended() || is_over(*watched) ? mine.erase(watched) : std::next(watched);
  report_late(mine);
  const std::lock_guard<std::mutex> lock(mutex_);
  all_.splice(all_.begin(), mine);
  sweeping_ = false;
}

bool Watcher::is_over(WatchedWork& watched) {
  try {
    if (reached(place_, watched.ended)) {
      if (watched.on_end && !abort_state_->ended()) watched.on_end();
      return true;
    }
    if (watched.late == kNotBegun && reached(place_, watched.begun))
      watched.late = TransportClock::now() + std::chrono::milliseconds(watched.limit_ms);
    return false;
  } catch (const Error& error) {
    abort_state_->fail({-1, false, error.what()});
    return true;
  }
}

// A late call is blamed on its oldest transfer that has not ended.
void Watcher::report_late(const std::list<WatchedWork>& all) {
  const auto now = TransportClock::now();
  const WatchedWork *late = nullptr, *transfer = nullptr;
  for (const WatchedWork& watched : all) {
    if (!late && now >= watched.late) late = &watched;
    if (!transfer && watched.is_transfer && watched.late != kNotBegun) transfer = &watched;
  }
  if (!late) return;
  const WatchedWork& why = transfer && !late->is_transfer ? *transfer : *late;
  abort_state_->fail({why.peer, true, why.what});
}

}  // namespace ringcomm::nccl
