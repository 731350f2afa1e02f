#include "bind/c10d/transport.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <new>
#include <utility>

#include <ATen/ATen.h>

#include "bind/c10d/messages.h"
#include "core/error.h"
#include "core/schedule.h"
#include "core/scope_exit.h"

namespace ringcomm {

namespace {

std::vector<at::Tensor> tensor_of(const Message& message) {
  const auto count = static_cast<std::int64_t>(message.nbytes);
  return {at::from_blob(message.data, {count}, at::TensorOptions().dtype(at::kByte))};
}

// Returns the first line of a library's error.
std::string first_line(const char* what) {
  const std::string text(what);
  return text.substr(0, text.find('\n'));
}

}  // namespace

// ---- sends and receives

void GroupLink::refuse(int peer) const { throw TransportFailure{peer, false, "the communicator was aborted"}; }

GroupWork GroupLink::send(const Message& message, int tag) {
  if (aborted()) refuse(message.peer);
  auto tensors = tensor_of(message);
  sent_bytes_.fetch_add(message.nbytes, std::memory_order_relaxed);
  try {
    return backend_->send(tensors, message.peer, first_tag_ + tag);
  } catch (const std::exception& error) {
    throw TransportFailure{message.peer, false, first_line(error.what())};
  }
}

GroupWork GroupLink::recv(const Message& message, int tag) {
  if (aborted()) refuse(message.peer);
  auto tensors = tensor_of(message);
  try {
    return backend_->recv(tensors, message.peer, first_tag_ + tag);
  } catch (const std::exception& error) {
    throw TransportFailure{message.peer, false, first_line(error.what())};
  }
}

void GroupLink::wait(const GroupWork& work, int peer, TransportClock::time_point limit) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waited_for_.insert(work);  // so that an abort can end it
  }
  const ScopeExit forget([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    waited_for_.erase(work);
  });
  if (aborted()) refuse(peer);
  using std::chrono::duration_cast;
  using std::chrono::milliseconds;
  // Rounded up, since a wait that ends slightly early would not count as late.
  const auto left =
      std::max(milliseconds(0), duration_cast<milliseconds>(limit - TransportClock::now())) + milliseconds(1);
  bool done = false;
  try {
    done = work->wait(left);
  } catch (const std::exception& error) {
    if (aborted()) refuse(peer);
    throw TransportFailure{peer, TransportClock::now() >= limit, first_line(error.what())};
  }
  if (!done) refuse(peer);
}

void GroupLink::abort() {
  aborted_.store(true);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const GroupWork& work : waited_for_) try {
      work->abort();
    } catch (const std::exception&) {  // unsupported by the backend: the wait ends at the call's limit
    }
}

namespace {

// ---- exchanges

class GroupExchange final : public TransportExchange {
 public:
  GroupExchange(GroupLink& link, int slot, std::vector<Round> rounds, TransportClock::time_point limit)
      : link_(link), tag_(GroupLink::kFirstSlot + slot), limit_(limit), rounds_(std::move(rounds)) {
    for (const Round& round : rounds_) {
      std::vector<GroupWork> works;
      for (const Message& message : round.recvs) works.push_back(link_.recv(message, tag_));
      receiving_.push_back(std::move(works));
    }
  }
  void start(int round) override {
    sending_.clear();
    for (const Message& message : rounds_[round].sends) sending_.push_back(link_.send(message, tag_));
  }
  void finish(int round) override {
    for (std::size_t i = 0; i < receiving_[round].size(); ++i)
      link_.wait(receiving_[round][i], rounds_[round].recvs[i].peer, limit_);
    for (std::size_t i = 0; i < sending_.size(); ++i) link_.wait(sending_[i], rounds_[round].sends[i].peer, limit_);
  }

 private:
  GroupLink& link_;
  const int tag_;
  const TransportClock::time_point limit_;
  const std::vector<Round> rounds_;
  std::vector<std::vector<GroupWork>> receiving_;
  std::vector<GroupWork> sending_;
};

constexpr std::size_t kSignatureBytes = 512;
// Where a message must be as long as its receive, every signature is sent with all bytes that may follow it.
constexpr std::size_t kInlineBytes = 256 << 10, kPaddedInlineBytes = 8 << 10;

// A call signature and the bytes that follow it. Some backends end the process if a message is longer than its receive.
class SignatureMessage {
 public:
  explicit SignatureMessage(std::size_t room) : bytes_(new char[sizeof(std::uint64_t) + room]), room_(room) {}

  void set(const std::string& text) {
    const std::uint64_t nbytes = text.size();
    std::memcpy(bytes_.get(), &nbytes, sizeof nbytes);
    std::memcpy(bytes_.get() + sizeof nbytes, text.data(), text.size());
    std::memset(bytes_.get() + sizeof nbytes + text.size(), 0, room_ - text.size());
  }
  std::string text() const {
    std::uint64_t nbytes;
    std::memcpy(&nbytes, bytes_.get(), sizeof nbytes);
    return {bytes_.get() + sizeof nbytes, smaller(nbytes, room_)};
  }
  Message with(int peer) const { return {peer, bytes_.get(), sizeof(std::uint64_t) + room_}; }

 private:
  std::unique_ptr<char[]> bytes_;
  std::size_t room_;
};
struct PendingSignature {
  SignatureMessage message;
  GroupWork work;  // null: no receive is posted
};

class GroupTransport final : public Transport {
 public:
  GroupTransport(BackendPtr backend, std::string name, int first_tag)
      : link_(std::make_shared<GroupLink>(std::move(backend), first_tag)),
        name_(std::move(name)),
        allows_short_sends_(name_ == "gloo"),
        messages_(link_) {}

  const char* kind() const override { return name_.c_str(); }

  std::size_t inline_bytes() const override { return allows_short_sends_ ? kInlineBytes : kPaddedInlineBytes; }

  std::vector<std::string> swap(const std::vector<CallSignature>& signatures, TransportClock::time_point limit,
                                std::uintptr_t) override {
    std::deque<SignatureMessage> messages;
    std::vector<GroupWork> sends;  // destroyed before the messages that they send
    for (const CallSignature& each : signatures) expect(each.peer);
    for (const CallSignature& each : signatures) {
      SignatureMessage& message = messages.emplace_back(allows_short_sends_ ? each.mine.size() : room());
      message.set(each.mine);
      sends.push_back(link_->send(message.with(each.peer), GroupLink::kSignature));
    }
    std::vector<std::string> theirs;
    for (const CallSignature& each : signatures) {
      PendingSignature& expected = expected_.at(each.peer);
      link_->wait(std::exchange(expected.work, nullptr), each.peer, limit);
      theirs.push_back(expected.message.text());
    }
    for (std::size_t i = 0; i < signatures.size(); ++i) link_->wait(sends[i], signatures[i].peer, limit);
    for (const CallSignature& each : signatures) try {
        expect(each.peer);
      } catch (const TransportFailure&) {  // a peer may leave after its last call; the next call with it, if any, fails
      }
    return theirs;
  }

  std::unique_ptr<TransportExchange> open(int slot, std::vector<Round> rounds, TransportClock::time_point limit,
                                          std::uintptr_t) override {
    return std::make_unique<GroupExchange>(*link_, slot, std::move(rounds), limit);
  }
  std::shared_ptr<Request> message(const Call& call, std::int64_t limit_ms) override {
    return messages_.submit(call, limit_ms);
  }

  void* allocate(std::size_t nbytes) override {
    void* const memory = std::aligned_alloc(64, round_up(nbytes, 64));
    if (!memory) throw std::bad_alloc();
    return memory;
  }
  void release(void* data) override { std::free(data); }

  void on_wait(std::function<bool(const char*)> interrupted) override { messages_.on_wait(std::move(interrupted)); }
  void abort() override { link_->abort(); }
  void close() override { messages_.close(); }
  bool runs_this_thread() const override { return messages_.runs_this_thread(); }
  std::uint64_t sent_bytes() const override { return link_->sent_bytes(); }

 private:
  // The bytes of a signature and of what may follow it.
  std::size_t room() const { return kSignatureBytes + inline_bytes(); }
  // Posts a receive of the peer's next signature, of any length. It is posted early, so that it is received at once.
  void expect(int peer) {
    auto found = expected_.find(peer);
    if (found == expected_.end())
      found = expected_.emplace(peer, PendingSignature{SignatureMessage(room()), nullptr}).first;
    PendingSignature& expected = found->second;
    if (!expected.work) expected.work = link_->recv(expected.message.with(peer), GroupLink::kSignature);
  }

  const std::shared_ptr<GroupLink> link_;
  const std::string name_;
  const bool allows_short_sends_;             // a message may be shorter than its receive
  std::map<int, PendingSignature> expected_;  // by peer; used by the thread that runs the calls
  mutable GroupMessages messages_;
};

}  // namespace

std::shared_ptr<Transport> make_group_transport(BackendPtr backend, std::string name, int first_tag) {
  return std::make_shared<GroupTransport>(std::move(backend), std::move(name), first_tag);
}

}  // namespace ringcomm
