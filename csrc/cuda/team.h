// Ranks of one process that share a device meet on the host: each posts its call, the last one launches for all, since
// blocks that wait for each other must all be in one launch. Calls of the ranks are matched in order; what differs is
// found here, before anything is launched.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/engine.h"
#include "cuda/launch.h"
#include "cuda/outcome.h"
#include "cuda/status.h"

namespace ringcomm::cuda {

class Context;

// What a rank calls at once: one call, or a list that one launch serves.
struct Batch {
  const Call* calls = nullptr;
  int num_calls = 0;
  cudaStream_t stream = nullptr;
  unsigned long long capture = 0;
  std::int64_t limit_ms = 0;
  MarkPtr ready;           // the point of `stream` from which on the inputs are there; null: where it is at the launch
  std::vector<Call> kept;  // the calls, if their caller does not wait

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
  Team(Verdict& verdict, std::vector<int> ranks);

  void join(Context& context);
  // The rank makes no more calls, and none of its calls is open.
  void leave(int rank);

  // The next call of this rank. With the last rank that comes it is launched, by this thread. The outcome may be
  // shared with the other ranks.
  std::shared_ptr<Outcome> post(Context& context, Batch batch);

  // Throws if this rank's next call is the one in which others were found to differ, or comes before it.
  void check_mismatch(int rank);
  // The verdict is passed: what is open fails.
  void end_all();
  // The end of what was launched last.
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

  Verdict& verdict_;
  mutable std::mutex mutex_;
  std::vector<Seat> seats_;
  std::deque<std::shared_ptr<Round>> open_;  // the rounds that some ranks have yet to come to
  std::uint64_t first_open_ = 0;             // number of the first of them
  std::exception_ptr mismatch_;              // of round mismatch_round_
  std::uint64_t mismatch_round_ = 0;
  Newest newest_;
};

}  // namespace ringcomm::cuda
