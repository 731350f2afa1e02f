// Turns the calls of the ranks in one launch into plans, kernel arguments and launches.
#pragma once

#include <optional>
#include <vector>

#include "core/call/parts.h"
#include "cuda/device/kernels.h"
#include "cuda/launch/context.h"
#include "cuda/launch/copy_engine.h"
#include "cuda/launch/local_group.h"

namespace ringcomm::cuda {

class LaunchBuilder {
 public:
  // `members[lead]` launches the calls, on its stream; `number`: of the call. Makes all checks that are possible before
  // anything is enqueued.
  LaunchBuilder(const std::vector<LaunchMember>& members, std::size_t lead, std::uint64_t number);
  // Lets the ranks agree on the host, as some calls need before anything is enqueued; see CopyCall.
  void agree();
  // Enqueues the calls. Returns whether their kernels wait for other ranks.
  bool enqueue() const;
  // The algorithm that serves the calls, once the ranks have agreed.
  Algorithm algorithm() const { return plan_.algorithm; }

 private:
  const Call& call(std::size_t member = 0, int i = 0) const { return members_[member].batch->calls[i]; }
  int num_calls() const { return members_[lead_].batch->num_calls; }
  int world_size() const { return setting_.layout.world_size; }
  Context& context() const { return *members_[lead_].context; }
  cudaStream_t stream() const { return members_[lead_].batch->stream; }

  void check_all_to_all() const;
  std::uint64_t nbytes() const;
  Plan plan_for(Algorithm requested) const;
  bool in_place_anywhere() const;
  template <typename Args>
  int channels(Kernel<Args> kernel) const;
  template <typename Args>
  void launch_kernel(Kernel<Args> kernel, int channels, const Args& args) const;

  template <typename Args>
  void fill_common(Args& args) const;
  RankArgs rank_args(const LaunchMember& member) const;
  void locate(RankArgs& rank, const LaunchMember& member) const;
  void reduce() const;
  void reduce_known() const;
  void reduce_packets(Kernel<CallArgs> kernel, CallArgs& args, std::size_t element) const;
  void reduce_each_part(Kernel<CallArgs> kernel, CallArgs& args, int scale) const;
  int add_messages(CallArgs& args, int scale) const;
  void ring_copy() const;
  void copy() const;
  template <typename Args>
  void exchange(Kernel<Args> kernel) const;

  const std::vector<LaunchMember>& members_;
  const std::size_t lead_;
  const std::uint64_t number_;
  const Setting setting_;
  Plan plan_;
  std::optional<CopyCall> copies_;  // set if it serves the call
};

// Whether an all_to_all writes where it reads.
bool in_place(const Call& call, int world_size);

// Whether oneshot serves the call: not every pair has a kernel, its packets carry no factors, and every rank needs room
// for those of all others.
bool has_packets(const Call& call, int world_size);

// Whether the parts are contiguous and of equal size, so that the first address stands for all.
bool in_one_piece(const Parts& parts, int world_size, std::size_t element);

}  // namespace ringcomm::cuda
