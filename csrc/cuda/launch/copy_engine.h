// all_gather and all_to_all without a kernel (algorithm="copy_engine"): copies, meant for the GPUs' copy engines, move
// the bytes, so that all multiprocessors stay with the program.
//
// If one launch holds all ranks, it enqueues only copies, behind the points at which all inputs are ready. Otherwise a
// copy must know the peers' buffers when it is enqueued, so the ranks first meet on the host, by mail: each sends its
// call and the locations of the parts that it gives. All ranks read the same letters and make the same decision: to
// copy; or, if some rank's parts are not visible to its peers (yet), or a call is in place or captured into a graph, to
// use the kernels of `direct`. To copy, the stream of each rank does this:
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
#include "cuda/launch/stream_ops.h"
#include "cuda/launch/team.h"

namespace ringcomm::cuda {

class CopyCall {
 public:
  // `number`: of the call, among all of the communicator.
  CopyCall(const std::vector<Row>& rows, std::size_t lead, std::uint64_t number);

  // Whether all ranks copy. Waits for the ranks that are not in this launch, at most for the limit of the call. Throws,
  // before anything is enqueued, if ranks differ, or if a call that names this algorithm cannot be served.
  bool agree();
  void enqueue() const;

  // For a call by kernels: throws if a peer has come to this call, or to an earlier one, as a call that copies.
  static void check_no_letter(const std::vector<Row>& rows, std::uint64_t number);

 private:
  // What a rank tells one of its peers.
  struct Letter {
    Signature signature{};
    Location part{};  // that it gives to this peer
    std::uint64_t nbytes = 0;
    bool visible = false;  // all parts that it gives to ranks elsewhere
    bool captured = false, in_place = false;
    bool able = false;  // its streams can wait for words

    std::string text() const;
    bool read(const std::string& text);
  };

  const Call& call(std::size_t row) const { return rows_[row].batch->first(); }
  Context& context() const { return *rows_[lead_].context; }
  int world_size() const { return context().world_size(); }
  std::uint32_t ticket() const { return static_cast<std::uint32_t>(number_ + 1); }
  bool is_here(int rank) const { return row_of_[rank] >= 0; }

  Part given(std::size_t row, int to) const;
  Part taken(std::size_t row, int from) const;
  std::vector<Letter> write(std::size_t row) const;
  void exchange(const std::vector<std::vector<Letter>>& letters);
  void compare(std::size_t row, const Letter& mine, int peer) const;
  [[noreturn]] void refuse(int rank, const char* got, const char* advice) const;
  const char* source(std::size_t row, int from) const;
  std::vector<WordOp> word_ops(std::uint32_t CopyWords::* word, bool waits) const;

  const std::vector<Row>& rows_;
  const std::size_t lead_;
  const std::uint64_t number_;
  std::vector<int> row_of_;                // by rank; -1: elsewhere
  std::vector<std::vector<Letter>> said_;  // by row and rank
};

}  // namespace ringcomm::cuda
