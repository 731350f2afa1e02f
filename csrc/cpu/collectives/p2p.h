// Point-to-point messages. Every ordered pair of ranks has its own board. A message has its size and tag in the first
// slot's header, and its bytes in as many slots as they need. Messages of a pair stay in order per tag; a message that
// arrives before its receive was posted is stored, unless nothing but a probe asks for it: then it stays on the board.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "cpu/collectives/streaming.h"
#include "cpu/group/state.h"
#include "runtime/progress/work_queue.h"

namespace ringcomm::cpu {

class PointToPoint {
 public:
  explicit PointToPoint(Group& group);
  ~PointToPoint() { stop(); }

  // Returns the source of a receive.
  int run(const Call& call);
  std::shared_ptr<Request> submit(Call call);
  // See Engine::probe: the first waits.
  MessageInfo probe(const Call& call);
  std::optional<MessageInfo> probe_now(const Call& call);
  // Finishes queued sends; open receives end with an error.
  void stop();
  bool idle();
  std::size_t pending() const { return pending_.load(); }
  bool runs_this_thread() const { return thread_.get_id() == std::this_thread::get_id(); }

 private:
  class Message;
  using MessagePtr = std::shared_ptr<Message>;

  struct UnexpectedMessage {  // a message that arrived before its receive
    int tag;
    DType dtype = DType::kUInt8;
    std::size_t nbytes = 0, filled = 0;
    std::unique_ptr<char[]> data;  // null: the message is dropped, since its receive had another size or type
  };
  struct SendQueue {  // to one destination
    std::uint64_t ticket = 0;
    std::size_t cursor = 0;
    SlotWriting writing;
    std::deque<MessagePtr> queue;
  };
  struct ReceiveQueue {  // from one source
    std::uint64_t ticket = 0;
    SlotReading reading;
    MessagePtr current;                             // the receive that is being filled
    std::unique_ptr<UnexpectedMessage> unexpected;  // or the message that is being stored
    std::deque<std::unique_ptr<UnexpectedMessage>> arrived;
  };

  bool send_now(const Call& call);
  bool receive_now(const Call& call);
  void put(const Call& call, std::size_t total, const char* data, std::size_t nbytes);
  void take(int source, void* to, std::size_t nbytes, bool streaming);
  MessagePtr enqueue(Call call);
  void wait(Message& message, std::int64_t timeout_ms);
  int lost_for(const Call& call) const;
  std::string end_of(int rank) const;
  std::string expectation(const Message& message) const;
  std::string another_tag(const Call& call);
  [[noreturn]] void report_lost(const Message& message, int lost);
  void check(const Message& message);
  bool queued(const Message& message);
  MessagePtr most_urgent();
  MessagePtr next_send();
  template <typename Visit>
  void for_each_pending(const Visit& visit);
  bool advance(std::vector<MessagePtr>& finished);
  bool push(int destination, std::vector<MessagePtr>& finished);
  bool pull(int source, std::vector<MessagePtr>& finished);
  void begin(int source, std::vector<MessagePtr>& finished);
  bool match_arrived(std::vector<MessagePtr>& finished);
  MessagePtr claim_receive(int source, int tag, DType dtype, std::size_t nbytes, std::vector<MessagePtr>& finished);
  bool wanted(int source) const;
  void fail_all(std::exception_ptr error);
  bool step(const MessagePtr& visitor = nullptr);
  void progress();

  Group& group_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<SendQueue> outgoing_;
  std::vector<ReceiveQueue> incoming_;
  std::deque<MessagePtr> receives_;  // and probes, in the order of the calls
  std::atomic<std::size_t> pending_{0};
  std::thread thread_;
  bool stopping_ = false;
};

}  // namespace ringcomm::cpu
