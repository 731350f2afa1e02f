// The user's sends and receives, on communicators of their own. Messages that are posted before a thread waits form one
// group, so that a send and a receive between the same two ranks never wait for each other, whichever comes first.
#pragma once

#include <deque>

#include "hierarchy/nccl/request.h"

namespace ringcomm::nccl {

// The messages of one communicator, in groups that run one after the other.
class MessageQueue {
 public:
  MessageQueue(const Library& library, std::shared_ptr<const TransportState> shared, const std::string& id,
               TransportClock::time_point limit);

  void post(const Message& message, bool sends, std::int64_t limit_ms, cudaStream_t caller,
            std::shared_ptr<TransportRequest> request);
  // Takes the next step if possible: finishes a group that has been enqueued, or begins the next one. `hurry`: does not
  // wait for more messages to join the group. Returns whether there is more to do.
  bool advance(bool hurry);
  bool idle() const;
  Communicator& communicator() { return communicator_; }

 private:
  struct PostedMessage {
    Message message;
    bool sends;
    std::int64_t limit_ms;
    StreamEventPtr ready;
    TransportClock::time_point since;
    std::shared_ptr<TransportRequest> request;
  };
  bool conclude();
  void begin();

  const std::shared_ptr<const TransportState> shared_;
  Stream stream_;
  Communicator communicator_;
  mutable std::mutex mutex_;
  std::deque<PostedMessage> posted_;
  std::vector<PostedMessage> group_;  // begun, not enqueued yet
  Round round_;                       // of the same group
  StreamEventPtr begun_;
  TransportClock::time_point since_;
  std::int64_t limit_ms_ = 0;
};

}  // namespace ringcomm::nccl
