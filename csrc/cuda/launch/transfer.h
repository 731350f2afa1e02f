// Sends and receives. Those between ranks of one process are matched on the host: a receive takes the oldest message of
// its source with its tag, and the side that comes later enqueues the copy. Between processes, kernels pass the bytes
// over the links of the segments; there the messages of two ranks must match in order.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/engine.h"
#include "cuda/streams/pending_call.h"
#include "cuda/streams/status.h"

namespace ringcomm::cuda {

class Context;

class Matcher {
 public:
  explicit Matcher(AbortState& abort_state) : abort_state_(abort_state) {}

  // Posts a send or receive whose other side is in this process. Enqueues the copy if the other side has been posted.
  std::shared_ptr<PendingCall> post(Context& context, Call call, cudaStream_t stream, unsigned long long capture);

  // Ends the messages of a rank: its receives fail. Returns its sends that are still open.
  std::vector<std::shared_ptr<PendingCall>> close(int rank);
  bool has_open(int rank);
  // Fails the open messages, because the communicator has ended.
  void end_all();

 private:
  class Message;
  using MessagePtr = std::shared_ptr<Message>;

  MessagePtr claim(std::deque<MessagePtr>& queue, const Message& message);
  bool cancel(const Message& message);
  void copy(Message& message, Message& other);

  AbortState& abort_state_;
  std::mutex mutex_;
  std::deque<MessagePtr> sends_, receives_;  // open ones, in the order of their calls
};

// Divides messages among launches: all go into one, or else the first message of every link, then the second of every
// link, and so on. The other end of the k-th message of a link is then in the k-th launch there, or in an earlier one.
std::vector<std::vector<const Call*>> split_into_launches(const std::vector<const Call*>& calls);

// The links of one rank to ranks in other processes.
class Links {
 public:
  explicit Links(Context& context) : context_(context) {}
  // Creates the streams: later that might wait for kernels that wait for this rank. Call it when the peers are known.
  void connect();

  bool leads_to(int peer) const;
  // Enqueues sends and receives together, in one launch or several, because they may wait for each other's peers. Each
  // link keeps the order of its calls.
  std::shared_ptr<PendingCall> post(const std::vector<const Call*>& calls, cudaStream_t stream,
                                    unsigned long long capture);
  // The engine's stream for a call whose caller does not wait: sends and receives on one stream would wait for each
  // other.
  cudaStream_t stream_of(const Call& call) const { return streams_.at(key_of(call)); }
  // The ends of the last launch of every link.
  std::vector<StreamEventPtr> last() const;
  ~Links();

 private:
  using LinkKey = std::pair<int, bool>;  // peer, whether this rank sends
  static LinkKey key_of(const Call& call) { return {call.root, call.op == Op::kSend}; }

  Context& context_;
  int threads_ = 0;   // of a block
  int room_ = 0;      // blocks of the kernel that fit on the device beside those of the other ranks there
  int channels_ = 1;  // most of a link
  mutable std::mutex mutex_;
  std::map<LinkKey, LatestEvents> latest_;
  std::map<LinkKey, cudaStream_t> streams_;
};

}  // namespace ringcomm::cuda
