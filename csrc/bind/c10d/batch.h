// The calls that a thread has made since startCoalescing. Those of other threads on the same group do not join them.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "bind/c10d/task.h"
#include "bind/c10d/work.h"

namespace ringcomm {

struct Batch {
  c10::intrusive_ptr<AsyncWork> on_cpu;  // calls that the engine has; null: none yet
  std::vector<Task> on_device;
  Tensors outputs;     // of the calls on a device, like all members below
  bool async = false;  // whether any of them is
  std::uint64_t sequence = 0;
};

// The batches of a group, by thread.
class Batches {
 public:
  // Forgets a batch that this thread has not ended.
  void begin() {
    abandon();
    const std::lock_guard<std::mutex> lock(mutex_);
    batches_[std::this_thread::get_id()];
    count_ = batches_.size();
  }
  // This thread's batch; null: it has none.
  Batch* find() {
    if (count_.load(std::memory_order_relaxed) == 0) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = batches_.find(std::this_thread::get_id());
    return found == batches_.end() ? nullptr : &found->second;
  }
  std::optional<Batch> end() {
    if (!find()) return std::nullopt;
    const std::lock_guard<std::mutex> lock(mutex_);
    auto node = batches_.extract(std::this_thread::get_id());
    count_ = batches_.size();
    return std::move(node.mapped());
  }
  // Ends this thread's batch because a call in it was refused: torch then does not call endCoalescing. The calls that
  // the engine has run to their end.
  void abandon() {
    const std::optional<Batch> batch = end();
    if (batch && batch->on_cpu) batch->on_cpu->finish_adding();
  }

 private:
  std::atomic<std::size_t> count_{0};
  std::mutex mutex_;
  std::map<std::thread::id, Batch> batches_;
};

}  // namespace ringcomm
