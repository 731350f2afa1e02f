// The Work of asynchronous calls: one or more requests of the engine that complete as one.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "bind/c10d/task.h"

namespace ringcomm {

// The steps of a Work:
//
//   add, add, ...   each submits one call; the callback of its request holds a reference to the Work, so that the
//                   tensors live until the engine is done with them even if the caller drops the Work
//   finish_adding   no more calls are added
//   settle          the engine ends a call; the last one writes stand-ins back, finishes the Work and its future
class AsyncWork final : public c10d::Work {
 public:
  // With a title the profiler gets a span, which shows the shapes of the inputs.
  AsyncWork(int rank, c10d::OpType type, std::uint64_t sequence, const char* title = nullptr,
            std::optional<Tensors> inputs = std::nullopt)
      : c10d::Work(rank, type, title, inputs), sequence_(sequence) {}

  void add(Engine& engine, Task&& task, at::TensorList outputs);
  void finish_adding() { settle(nullptr); }

  int sourceRank() const override;
  Tensors result() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

 private:
  void settle(std::exception_ptr error);
  void end();
  bool claim_future();
  void complete_future();

  const std::uint64_t sequence_;
  std::atomic<int> pending_{1};  // calls in flight, plus one until `finish_adding`
  std::vector<std::shared_ptr<Request>> requests_;
  Tensors outputs_, keep_;
  WriteBack pairs_;
  std::exception_ptr error_;  // guarded by mutex_, like all members below
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool python_future_ = false, future_claimed_ = false;
};

}  // namespace ringcomm
