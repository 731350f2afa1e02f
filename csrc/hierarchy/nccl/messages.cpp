#include "hierarchy/nccl/messages.h"

#include <algorithm>

#include "core/error.h"

namespace ringcomm::nccl {

namespace {
constexpr auto kGather = std::chrono::milliseconds(1);  // time to collect a group while no thread waits
}

MessageQueue::MessageQueue(const Library& library, std::shared_ptr<const TransportState> shared, const std::string& id,
                           TransportClock::time_point limit)
    : shared_(std::move(shared)),
      stream_(shared_->place.device, shared_->place.rank),
      communicator_(library, *shared_->abort_state, shared_->place, id, limit) {}

void MessageQueue::post(const Message& message, bool sends, std::int64_t limit_ms, cudaStream_t caller,
                        std::shared_ptr<TransportRequest> request) {
  StreamEventPtr ready = shared_->record(caller);
  const std::lock_guard<std::mutex> lock(mutex_);
  posted_.push_back({message, sends, limit_ms, std::move(ready), TransportClock::now(), std::move(request)});
}

bool MessageQueue::idle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return posted_.empty() && group_.empty();
}

bool MessageQueue::advance(bool hurry) {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock) return true;  // another thread is advancing it
  if (shared_->abort_state->is_over()) {
    posted_.clear();
    group_.clear();
    return false;
  }
  const DeviceScope on(shared_->place.device, shared_->place.rank);
  if (!group_.empty() && !conclude()) return true;
  if (posted_.empty()) return false;
  if (!hurry && TransportClock::now() < posted_.front().since + kGather) return true;
  begin();
  conclude();
  return true;
}

void MessageQueue::begin() {
  round_ = {};
  limit_ms_ = 0;
  group_.assign(std::make_move_iterator(posted_.begin()), std::make_move_iterator(posted_.end()));
  posted_.clear();
  for (const PostedMessage& posted : group_) {
    shared_->follow(stream_, posted.ready);
    (posted.sends ? round_.sends : round_.recvs).push_back(posted.message);
    limit_ms_ = std::max(limit_ms_, posted.limit_ms);
  }
  since_ = TransportClock::now();
  begun_ = shared_->record(stream_);
  communicator_.begin(round_, stream_);
}

bool MessageQueue::conclude() {
  if (!communicator_.settled(round_)) {
    if (TransportClock::now() >= since_ + std::chrono::milliseconds(limit_ms_))
      throw TransportFailure{only_peer(round_), true, text_of(round_)};
    return false;
  }
  const StreamEventPtr ended = shared_->record(stream_);
  shared_->watcher->watch({begun_, ended, limit_ms_, true, only_peer(round_), text_of(round_)});
  for (const PostedMessage& posted : group_) posted.request->enqueued(ended);
  group_.clear();
  return true;
}

}  // namespace ringcomm::nccl
