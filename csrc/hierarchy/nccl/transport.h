// The transport between GPUs: rounds of ncclSend and ncclRecv on a separate stream. This stream waits for the caller's
// stream at the beginning of a round, and the caller's stream waits for it at the end of the round. So the transfers of
// one exchange overlap with the arithmetic of another.
#pragma once

#include "hierarchy/nccl/messages.h"
#include "hierarchy/nccl/staging.h"

namespace ringcomm::nccl {

class NcclTransport final : public Transport {
 public:
  explicit NcclTransport(const NcclOptions& options);
  ~NcclTransport() override;

  const char* kind() const override { return "nccl"; }
  std::vector<std::string> swap(const std::vector<CallSignature>& signatures, TransportClock::time_point limit,
                                std::uintptr_t stream) override;
  std::unique_ptr<TransportExchange> open(int slot, std::vector<Round> rounds, TransportClock::time_point limit,
                                          std::uintptr_t stream) override;
  std::shared_ptr<Request> message(const Call& call, std::int64_t limit_ms) override;
  void* allocate(std::size_t nbytes) override;
  void release(void* data) override;
  std::uintptr_t fork(std::uintptr_t stream) override;
  std::shared_ptr<Request> join(const Call& call, std::uintptr_t stream) override;
  void enter(std::uintptr_t stream) override;
  void leave(std::uintptr_t stream, const Call& call, std::int64_t limit_ms) override;
  void abort() override;
  void on_failure(std::function<void(const TransportFailure&)> handler) override {
    shared_->abort_state->on_failure(std::move(handler));
  }
  void close() override;
  bool runs_this_thread() const override { return shared_->watcher->runs_this_thread(); }
  std::uint64_t sent_bytes() const override { return sent_bytes_.load(); }
  std::vector<std::pair<std::string, std::string>> describe() const override;

  // Enqueues a round after the present work of `stream`; returns the event of its end.
  StreamEventPtr start(const Round& round, TransportClock::time_point limit, cudaStream_t stream);
  void finish(const StreamEventPtr& end, cudaStream_t stream);

 private:
  // Memory from allocate. Returning it to CUDA would wait for all work on the device, and so perhaps for a peer that
  // waits for this rank. So it stays here, and may be reused after the call in which it was released.
  struct Block {
    void* data;
    std::size_t nbytes;
    bool released = false;
    StreamEventPtr behind = {};
  };
  using Queues = std::vector<std::unique_ptr<MessageQueue>>;
  static bool advance(const Queues& queues, bool hurry);

  int rank() const { return shared_->place.rank; }
  DeviceScope on_device() const { return DeviceScope(shared_->place.device, rank()); }
  void check_open() const;
  void check_stream(const char* call, cudaStream_t stream) const;
  std::int64_t left_ms(TransportClock::time_point limit) const;
  void compare(const std::vector<CallSignature>& signatures, const char* theirs);
  bool tick();
  bool await_idle();

  const Library& library_;
  const std::shared_ptr<TransportState> shared_;
  Communicator communicator_;
  Stream transfers_;
  std::shared_ptr<Queues> queues_;
  StagingPool stagings_;
  std::mutex mutex_;  // for the members below
  std::unique_ptr<Stream> async_;
  StreamEventPtr entered_, last_;  // of the most recent call
  std::vector<Block> blocks_;
  std::atomic<std::uint64_t> sent_bytes_{0};
  std::atomic<std::int64_t> longest_ms_;
  std::atomic<bool> closed_{false};
};

}  // namespace ringcomm::nccl
