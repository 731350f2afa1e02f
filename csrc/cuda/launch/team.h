// Ranks of one process that share a device meet on the host. Each posts its call, and the last one launches for all,
// because blocks that wait for each other must all be in one launch. The calls of the ranks are matched in order; a
// mismatch is found here, before anything is launched.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/engine.h"
#include "cuda/launch/outcome.h"
#include "cuda/launch/status.h"
#include "cuda/launch/streams.h"

namespace ringcomm::cuda {

class Context;

// What a rank calls at once: one call, or a list that one launch serves.
struct Batch {
  const Call* calls = nullptr;
  int num_calls = 0;
  cudaStream_t stream = nullptr;
  unsigned long long capture = 0;
  std::int64_t limit_ms = 0;
  MarkPtr ready;           // the point of `stream` at which the inputs are ready; null: its end at the launch
  std::vector<Call> kept;  // copies of the calls, if their caller does not wait

  const Call& first() const { return calls[0]; }
};

// One member of a launch.
struct Row {
  int rank;
  Context* context;
  const Batch* batch;
};

class Team {
 public:
  Team(AbortState& abort_state, std::vector<int> ranks);

  void join(Context& context);
  // The rank makes no more calls, and none of its calls is open.
  void leave(int rank);

  // Posts the next call of this rank. The thread of the last rank that posts it launches it. The ranks may share the
  // outcome.
  std::shared_ptr<Outcome> post(Context& context, Batch batch);

  // Throws if ranks were found to differ in this rank's next call, or in a later one.
  void check_mismatch(int rank);
  // The communicator has ended: open calls fail.
  void end_all();
  // The end of the last launch.
  MarkPtr last() const;

 private:
  class Round;
  struct Seat {
    int rank;
    Context* context = nullptr;
    std::uint64_t calls = 0;
    Call last;  // without parts and addresses
    bool left = false;
  };

  Seat& seat_of(int rank);
  void check_mismatch(Seat& seat);
  void compare(const Round& round, const Seat& seat);
  void launch(Round& round, Seat& seat);
  void enqueue(Round& round, std::size_t lead);
  bool cancel(Round& round);
  std::string missing(const Round& round) const;
  void fail_open(std::exception_ptr error);

  AbortState& abort_state_;
  mutable std::mutex mutex_;
  std::vector<Seat> seats_;
  std::deque<std::shared_ptr<Round>> open_;  // the rounds that some ranks have yet to join
  std::uint64_t first_open_ = 0;             // number of the first of them
  std::exception_ptr mismatch_;              // of round mismatch_round_
  std::uint64_t mismatch_round_ = 0;
  Newest newest_;
};

}  // namespace ringcomm::cuda
