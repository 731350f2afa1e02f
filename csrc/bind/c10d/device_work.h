// The Work of asynchronous calls on a device: an event on an internal stream. Only barriers and waits with a time limit
// block the host.
#pragma once

#include <atomic>
#include <memory>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "bind/c10d/streams.h"
#include "bind/c10d/task.h"

namespace ringcomm {

// The engine of a group on its device, and the streams there. Works share it, since they may outlive their group.
struct DeviceLink {
  std::shared_ptr<Engine> engine;
  c10::Device device;
  std::shared_ptr<Streams> streams;

  // Throws the error that ended the communicator, if it is known already.
  void check(const char* call) const;
};

// Keeps the tensors of a call until it is done or its Work has been waited for; from then on the waiting stream comes
// after the call, and memory is freed in that order. The group holds them too, in case the Work is dropped. (With
// record_stream instead, the allocator would reuse the memory only when it happens to check the stream; torch stopped
// using it for the same reason.)
class CallTensors {
 public:
  // The call ends at the present point of `stream`.
  CallTensors(const std::shared_ptr<Streams>& streams, const c10::Stream& stream, bool captured, Tensors tensors)
      : end(streams->record(stream)), captured(captured), streams_(streams), tensors_(std::move(tensors)) {}
  ~CallTensors() {
    if (end && !captured) streams_->reuse(std::move(*end));
  }
  bool ended() const { return !end || (!captured && reached(*end)); }
  void release();
  bool released() const { return released_; }

  Event end;
  const bool captured;  // in a graph: the host cannot query the event

 private:
  const std::shared_ptr<Streams> streams_;
  std::atomic<bool> released_{false};
  Tensors tensors_;
};

class DeviceWork final : public c10d::Work {
 public:
  // `call`: its name, a literal; `source`: of a receive; `blocks_host`: as for a barrier; `stream`: the one that it
  // runs on.
  DeviceWork(int rank, c10d::OpType type, const char* call, std::uint64_t sequence, int source, bool blocks_host,
             const c10::Stream& stream, std::shared_ptr<const DeviceLink> link, std::shared_ptr<CallTensors> in_flight,
             Tensors outputs)
      : c10d::Work(rank, type),
        call_(call),
        sequence_(sequence),
        source_(source),
        blocks_host_(blocks_host),
        stream_(stream),
        link_(std::move(link)),
        in_flight_(std::move(in_flight)),
        outputs_(std::move(outputs)) {}

  bool isCompleted() override;
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override;
  int sourceRank() const override { return source_; }
  Tensors result() override { return outputs_; }
  // Makes the current stream wait. With a time limit, and after a barrier, the host waits too.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

 private:
  void wait_on_host(std::int64_t limit_ms);

  const char* const call_;
  const std::uint64_t sequence_;
  const int source_;
  const bool blocks_host_;
  const c10::Stream stream_;
  const std::shared_ptr<const DeviceLink> link_;
  const std::shared_ptr<CallTensors> in_flight_;
  const Tensors outputs_;
  std::atomic<bool> succeeded_{false};              // seen done while there was no error
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mutex_
};

}  // namespace ringcomm
