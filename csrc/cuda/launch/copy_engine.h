// all_gather and all_to_all without a kernel (algorithm="copy_engine"): copies, meant for the GPUs' copy engines, move
// the bytes, so that all multiprocessors stay with the program.
//
// If one launch holds all ranks, it enqueues only copies, behind the points at which all inputs are ready. Otherwise a
// copy must know the peers' buffers when it is enqueued, so the ranks first exchange messages on the host: each sends
// its call and the locations of the parts that it gives. All ranks read the same messages and make the same decision:
// to copy; or, if some rank's parts are not visible to its peers (yet), or a call is in place or captured into a graph,
// to use the kernels of `direct`. To copy, the stream of each rank does this:
//
//   write `ready` at every peer       my input may be read
//   wait for every peer's `ready`
//   copy from the peers' inputs to my own output
//   write `done` at every peer        I have read your input
//   wait for every peer's `done`      my input may be overwritten
//
// Each rank copies only into its own memory, so that no stream of a failed call writes into a peer's tensors later. The
// words are numbers of calls, which grow. StreamWaits ends the waits of calls that fail.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/launch/context.h"
#include "cuda/launch/local_group.h"
#include "cuda/streams/ops.h"

namespace ringcomm::cuda {

class CopyCall {
 public:
  // `number`: of the call, among all of the communicator.
  CopyCall(const std::vector<LaunchMember>& members, std::size_t lead, std::uint64_t number);

  // Whether all ranks copy. Waits for the ranks that are not in this launch, at most for the limit of the call. Throws,
  // before anything is enqueued, if ranks differ, or if a call that names this algorithm cannot be served.
  bool agree();
  void enqueue() const;

  // For a call by kernels: throws if a peer has made this call, or an earlier one, as a call that copies.
  static void check_no_copy_call(const std::vector<LaunchMember>& members, std::uint64_t number);

 private:
  // The message from a rank to one of its peers.
  struct CallInfo {
    Signature signature{};
    Location part{};  // that it gives to this peer
    std::uint64_t nbytes = 0;
    bool visible = false;  // all parts that it gives to ranks elsewhere
    bool captured = false, in_place = false;
    bool able = false;  // its streams can wait for words

    std::string text() const;
    bool read(const std::string& text);
  };

  const Call& call(std::size_t member) const { return members_[member].batch->first(); }
  Context& context() const { return *members_[lead_].context; }
  int world_size() const { return context().world_size(); }
  std::uint32_t ticket() const { return static_cast<std::uint32_t>(number_ + 1); }
  bool is_here(int rank) const { return member_of_[rank] >= 0; }

  Part given(std::size_t member, int to) const;
  Part taken(std::size_t member, int from) const;
  std::vector<CallInfo> write(std::size_t member) const;
  void exchange(const std::vector<std::vector<CallInfo>>& infos);
  void compare(std::size_t member, const CallInfo& mine, int peer) const;
  [[noreturn]] void refuse(int rank, const char* got, const char* advice) const;
  const char* source(std::size_t member, int from) const;
  std::vector<WordOp> word_ops(std::uint32_t CopyWords::* word, bool waits) const;

  const std::vector<LaunchMember>& members_;
  const std::size_t lead_;
  const std::uint64_t number_;
  std::vector<int> member_of_;                // by rank; -1: elsewhere
  std::vector<std::vector<CallInfo>> infos_;  // by member and rank
};

}  // namespace ringcomm::cuda
