// The user's sends and receives over a backend of torch.distributed. A header with tag, type and length precedes the
// bytes, so that a receive can take the oldest message with its tag, and a wrong type or length is reported as an
// error.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "bind/c10d/transport.h"

namespace ringcomm {

// One thread for each peer and direction, started by its first message.
class GroupMessages {
 public:
  explicit GroupMessages(std::shared_ptr<GroupLink> link) : link_(std::move(link)) {}
  // See Transport::on_wait; call it before any message.
  void on_wait(std::function<bool(const char*)> interrupted) { interrupted_ = std::move(interrupted); }
  ~GroupMessages() { close(); }

  std::shared_ptr<Request> submit(const Call& call, std::int64_t limit_ms);
  // Waits for sent messages; open receives end with an error.
  void close();
  bool runs_this_thread();

 private:
  class Item;
  using ItemPtr = std::shared_ptr<Item>;
  struct UnexpectedMessage {  // a message that arrived before its receive
    int tag;
    DType dtype;
    std::vector<char> bytes;
  };
  struct MessageStream {  // one direction between this rank and a peer
    std::deque<ItemPtr> open;
    std::vector<UnexpectedMessage> arrived;
    std::thread thread;
  };

  void send_all(int peer, MessageStream& stream);
  void receive_all(int peer, MessageStream& stream);
  // Copies the oldest stored message with the item's tag to the item. Returns the outcome; nothing if there is none.
  std::optional<std::exception_ptr> hand_over(MessageStream& stream, Item& item);
  static std::exception_ptr wrong_message(const Item& item, std::uint64_t nbytes, DType dtype);
  void read_one(int peer, MessageStream& stream, TransportClock::time_point limit);
  void fail(MessageStream& stream, const TransportFailure& failure);

  const std::shared_ptr<GroupLink> link_;
  std::function<bool(const char*)> interrupted_ = [](const char*) { return false; };
  std::mutex mutex_;  // for the members below
  std::condition_variable changed_;
  std::map<std::pair<bool, int>, MessageStream> streams_;  // by direction (true: sends) and peer
  bool closing_ = false;
};

}  // namespace ringcomm
