// all_gather and all_to_all without a kernel (algorithm="copy_engine"): the GPUs' copy engines move the bytes, and all
// multiprocessors stay with the program.
//
// Ranks of one launch: copies behind the points where all inputs are ready, nothing else. With ranks elsewhere, whose
// buffers a copy must know when it is enqueued, the ranks first meet on the host, by mail, and each says what it calls
// and where the parts lie that it gives. From the same letters all come to the same decision: to copy; or, where some
// rank's parts are not visible to its peers (yet), where a call is in place or captured into a graph, to go by the
// kernels of `direct`. Then on each rank's stream:
//
//   write `ready` at every peer       my input may be read
//   wait for every peer's `ready`
//   copy from the peers' inputs to my own output
//   write `done` at every peer        I have read your input
//   wait for every peer's `done`      mine may be written again
//
// Each rank copies into its own memory only: whatever becomes of a call, no stream writes into a peer's tensors later.
// The words are numbers of calls, which grow; see StreamWaits for what ends a wait.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/context.h"
#include "cuda/stream_ops.h"
#include "cuda/team.h"

namespace ringcomm::cuda {

class CopyCall {
 public:
  // `number`: of the call, among all of the communicator.
  CopyCall(const std::vector<Row>& rows, std::size_t lead, std::uint64_t number);

  // Whether all ranks copy. Waits for those that are not in this launch, at most as long as the call may take; throws,
  // before anything is enqueued, where ranks differ or a call for this algorithm by name cannot be served.
  bool agree();
  void enqueue() const;

  // A call by kernels: whether a peer has come to this one or one before as a call that copies.
  static void check_no_letter(const std::vector<Row>& rows, std::uint64_t number);

 private:
  // What a rank says to one of its peers.
  struct Letter {
    Signature signature{};
    Location part{};  // that it gives to this peer
    std::uint64_t nbytes = 0;
    bool visible = false;  // all that it gives to ranks elsewhere
    bool captured = false, in_place = false;
    bool able = false;  // its streams wait for words

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
