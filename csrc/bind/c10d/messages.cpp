#include "bind/c10d/messages.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/call/signature.h"
#include "core/error.h"

namespace ringcomm {

namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(50);  // interval of checks for signals

struct Header {
  std::uint64_t nbytes;
  std::int32_t tag;
  DType dtype;
};

const char* title(const Call& call) { return call.op == Op::kSend ? "send" : "recv"; }

std::exception_ptr error_of(const Call& call, const TransportFailure& failure) {
  return std::make_exception_ptr(
      Error(failure.late ? ErrorCode::kTimeout : ErrorCode::kRankLost,
            concat(title(call), ": a message with tag ", call.tag, call.op == Op::kSend ? " to rank " : " from rank ",
                   call.root, failure.late ? " did not get through in time (" : " was lost (", failure.what,
                   "); look at what that rank does, and create a new communicator")));
}

}  // namespace

class GroupMessages::Item final : public Request {
 public:
  Item(const Call& call, std::int64_t limit_ms, std::function<bool(const char*)> interrupted)
      : call_(call),
        interrupted_(std::move(interrupted)),
        limit_(TransportClock::now() + std::chrono::milliseconds(limit_ms)),
        nbytes_(call.count * element_bytes(call.dtype)) {}

  const Call& call() const { return call_; }
  TransportClock::time_point limit() const { return limit_; }
  std::size_t nbytes() const { return nbytes_; }
  // Whether a message of this length and type may be stored there.
  bool takes(std::uint64_t nbytes, DType dtype) const { return nbytes == nbytes_ && dtype == call_.dtype; }

  bool done() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }
  void wait(std::int64_t timeout_ms) override {
    if (process_ != getpid())
      ringcomm::fail(ErrorCode::kInvalid, title(call_),
                     ": was waited for in a process forked after it began; wait in the parent, and make a communicator "
                     "in the child, or start it with spawn");
    const auto end = timeout_ms > 0 ? TransportClock::now() + std::chrono::milliseconds(timeout_ms)
                                    : TransportClock::time_point::max();  // the message has its own limit
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_until(lock, std::min(TransportClock::now() + kLookEvery, end), [&] { return done_; })) {
      if (TransportClock::now() >= end)
        ringcomm::fail(ErrorCode::kTimeout, title(call_), ": waited ", timeout_ms / 1000.0,
                       " s for a message with rank ", call_.root,
                       ", which is still in flight; wait longer, or abort the communicator");
      lock.unlock();
      const bool stop = interrupted_(title(call_));
      lock.lock();
      if (!stop) continue;
      changed_.wait(lock, [&] { return done_; });  // only then may the caller reuse the memory
      if (error_) break;
      ringcomm::fail(ErrorCode::kAborted, title(call_), ": was interrupted by a signal");
    }
    if (error_) std::rethrow_exception(error_);
  }
  void on_done(std::function<void(std::exception_ptr)> callback) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!done_) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback(error_);
  }
  int source() const override { return call_.op == Op::kRecv ? call_.root : -1; }

  void end(std::exception_ptr error = nullptr) {
    std::vector<std::function<void(std::exception_ptr)>> callbacks;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      error_ = error;
      done_ = true;
      callbacks.swap(callbacks_);
    }
    changed_.notify_all();
    for (auto& callback : callbacks) callback(error);
  }

 private:
  const Call call_;
  const std::function<bool(const char*)> interrupted_;
  const TransportClock::time_point limit_;
  const std::size_t nbytes_;
  const pid_t process_ = getpid();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
  std::vector<std::function<void(std::exception_ptr)>> callbacks_;
};

std::shared_ptr<Request> GroupMessages::submit(const Call& call, std::int64_t limit_ms) {
  const auto item = std::make_shared<Item>(call, limit_ms, interrupted_);
  const bool sends = call.op == Op::kSend;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_ || link_->aborted()) {
      item->end(error_of(call, {call.root, false, closing_ ? "the communicator was closed" : "it was aborted"}));
      return item;
    }
    MessageStream& stream = streams_[{sends, call.root}];
    stream.open.push_back(item);
    if (!stream.thread.joinable())
      stream.thread = std::thread([this, sends, peer = call.root, &stream] {
        if (sends)
          send_all(peer, stream);
        else
          receive_all(peer, stream);
      });
  }
  changed_.notify_all();
  return item;
}

void GroupMessages::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(closing_, true)) return;
  }
  changed_.notify_all();
  for (auto& [which, stream] : streams_)
    if (which.first && stream.thread.joinable()) stream.thread.join();
  link_->abort();  // ends threads that still wait for a header
  for (auto& [which, stream] : streams_)
    if (stream.thread.joinable()) stream.thread.join();
}

bool GroupMessages::runs_this_thread() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(streams_.begin(), streams_.end(),
                     [](const auto& stream) { return stream.second.thread.get_id() == std::this_thread::get_id(); });
}

// Ends all open messages with an error.
void GroupMessages::fail(MessageStream& stream, const TransportFailure& failure) {
  std::deque<ItemPtr> open;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    open.swap(stream.open);
  }
  for (const ItemPtr& item : open) item->end(error_of(item->call(), failure));
}

void GroupMessages::send_all(int peer, MessageStream& stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || !stream.open.empty(); });
    if (stream.open.empty()) return;
    const std::deque<ItemPtr> batch = stream.open;
    lock.unlock();
    std::deque<Header> headers;
    std::vector<std::vector<GroupWork>> works;
    try {
      for (const ItemPtr& item : batch) {  // starts all of them before waiting for the first
        headers.push_back({item->nbytes(), item->call().tag, item->call().dtype});
        works.push_back({link_->send({peer, &headers.back(), sizeof(Header)}, GroupLink::kHeader)});
        if (item->nbytes())
          works.back().push_back(
              link_->send({peer, const_cast<void*>(item->call().input), item->nbytes()}, GroupLink::kPayload));
      }
      for (std::size_t i = 0; i < batch.size(); ++i) {
        for (const GroupWork& work : works[i]) link_->wait(work, peer, batch[i]->limit());
        lock.lock();
        stream.open.pop_front();
        lock.unlock();
        batch[i]->end();
      }
    } catch (const TransportFailure& failure) {
      works.clear();  // before the callers are told that their memory is free
      fail(stream, failure);
    }
    lock.lock();
  }
}

void GroupMessages::receive_all(int peer, MessageStream& stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || !stream.open.empty(); });
    if (stream.open.empty()) return;
    auto limit = stream.open.front()->limit();
    for (const ItemPtr& item : stream.open) limit = std::min(limit, item->limit());
    std::vector<std::pair<ItemPtr, std::exception_ptr>> served;
    for (auto it = stream.open.begin(); it != stream.open.end();)
      if (const auto outcome = hand_over(stream, **it)) {
        served.emplace_back(*it, *outcome);
        it = stream.open.erase(it);
      } else {
        ++it;
      }
    lock.unlock();
    for (const auto& [item, error] : served) item->end(error);
    if (served.empty()) try {
        read_one(peer, stream, limit);
      } catch (const TransportFailure& failure) {
        fail(stream, failure);
      } catch (const std::exception& error) {  // such as no memory for a message without a receive
        fail(stream, {peer, false, error.what()});
      }
    lock.lock();
  }
}

std::exception_ptr GroupMessages::wrong_message(const Item& item, std::uint64_t nbytes, DType dtype) {
  return std::make_exception_ptr(Error(
      ErrorCode::kMismatch,
      concat("recv: expected ", message_text(item.nbytes(), item.call().dtype), " with tag ", item.call().tag,
             " from rank ", item.call().root, ", got ", message_text(nbytes, dtype), "; send and receive the same")));
}

std::optional<std::exception_ptr> GroupMessages::hand_over(MessageStream& stream, Item& item) {
  const auto it = std::find_if(stream.arrived.begin(), stream.arrived.end(),
                               [&](const UnexpectedMessage& arrived) { return arrived.tag == item.call().tag; });
  if (it == stream.arrived.end()) return std::nullopt;
  std::exception_ptr error;
  if (!item.takes(it->bytes.size(), it->dtype))
    error = wrong_message(item, it->bytes.size(), it->dtype);
  else if (item.nbytes())
    std::memcpy(item.call().output, it->bytes.data(), item.nbytes());
  stream.arrived.erase(it);
  return error;
}

// Receives the next message of the peer, into the oldest receive with its tag, or stores it.
void GroupMessages::read_one(int peer, MessageStream& stream, TransportClock::time_point limit) {
  Header header{};
  link_->wait(link_->recv({peer, &header, sizeof header}, GroupLink::kHeader), peer, limit);
  ItemPtr item;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = std::find_if(stream.open.begin(), stream.open.end(),
                                 [&](const ItemPtr& each) { return each->call().tag == header.tag; });
    if (it != stream.open.end()) {
      item = *it;
      stream.open.erase(it);
    }
  }
  const bool fits = item && item->takes(header.nbytes, header.dtype);
  UnexpectedMessage unexpected{header.tag, header.dtype, std::vector<char>(fits ? 0 : header.nbytes)};
  void* const target = fits ? item->call().output : unexpected.bytes.data();
  try {
    if (header.nbytes) link_->wait(link_->recv({peer, target, header.nbytes}, GroupLink::kPayload), peer, limit);
  } catch (const TransportFailure& failure) {
    if (item) item->end(error_of(item->call(), failure));
    throw;
  }
  if (fits) return item->end();
  if (item) return item->end(wrong_message(*item, header.nbytes, header.dtype));
  const std::lock_guard<std::mutex> lock(mutex_);
  stream.arrived.push_back(std::move(unexpected));
}

}  // namespace ringcomm
