// The connected segments of one communicator: the state of each rank, waiting for a peer, and notifying it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/call/signature.h"
#include "core/engine.h"
#include "core/error.h"
#include "core/link.h"
#include "cpu/group/process.h"
#include "cpu/group/segment.h"
#include "cpu/group/wait.h"
#include "cpu/group/wait_graph.h"
#include "runtime/interrupt.h"
#include "runtime/observe/trace.h"
#include "runtime/shared_memory.h"

namespace ringcomm::cpu {

// The time limit of one call. The clock is first read when a wait turns out to be long.
struct Deadline {
  const Call* call;
  std::int64_t timeout_ms;
  mutable Clock::time_point end{};

  bool passed() const {
    const auto now = Clock::now();
    if (end == Clock::time_point{}) end = now + std::chrono::milliseconds(timeout_ms);
    return now > end;
  }
};

class Group;

// A wait that enters the wait graph once it has become long, and detects a deadlock.
class LongWait {
 public:
  // A wait with a short time limit, or for any rank, does not enter the graph. `what`: see WaitGraph::Entry.
  LongWait(const Group& group, WaitKind kind, int peer, std::int64_t limit_ms, const void* what, const char* site = "")
      : group_(group), kind_(kind), peer_(peer), limit_ms_(limit_ms), what_(what), site_(site) {}
  ~LongWait();
  LongWait(const LongWait&) = delete;

  // Call this regularly, before the checks for an abort or a lost rank: it aborts the communicator in a deadlock.
  template <typename HasCome>
  void check(const HasCome& has_come);

 private:
  void search(Clock::time_point now, const std::function<bool()>& has_come);

  const Group& group_;
  const WaitKind kind_;
  const int peer_;
  const std::int64_t limit_ms_;
  const void* const what_;
  const char* const site_;
  Clock::time_point next_{};
  WaitGraph::Entry* entry_ = nullptr;
  std::vector<WaitGraph::PartyState> seen_;
};

class Group {
 public:
  Group(int rank, int world_size, const EngineOptions& options);
  ~Group();
  // In a forked child: shared state stays unchanged.
  void disown() { disowned_ = true; }
  // Sets the function by which the wait graph asks for this rank's activity; before connect.
  void set_activity(std::function<WaitGraph::Activity()> activity) { member_.activity = std::move(activity); }
  // See Engine::count_waits.
  void count_waits(std::shared_ptr<Flag> waited) { waited_ = std::move(waited); }
  // Called before every call.
  void note_caller() const { graph_->note_caller(member_); }
  // Removes the rank from the wait graph, before the engine is destroyed.
  void forget() const { graph_->remove(member_); }

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  std::size_t slot_bytes() const { return layout_.slot_bytes; }
  std::size_t p2p_slot_bytes() const { return layout_.p2p_slot_bytes; }
  bool shares_address_space() const { return shares_address_space_; }
  bool connected() const { return connected_; }
  const trace::Origin& origin() const { return origin_; }

  std::string handle() const;
  void connect(const std::vector<std::string>& handles);

  // The board that rank `peer` writes and this rank reads (peer may be this rank).
  const Board& board(int peer) const { return peers_[peer].board; }
  Board p2p_board(int source, int destination) const;
  Control& control(int peer) const { return *reinterpret_cast<Control*>(peers_[peer].segment->data()); }
  Control& control() const { return *reinterpret_cast<Control*>(mine_->data()); }
  // The address of a location in `peer`'s visible memory, in this process.
  char* resolve(int peer, const Location& location);

  // Waits until a flag in `peer`'s segment reaches `target`.
  void wait(int peer, const Flag* flag, std::uint64_t target, const Deadline& deadline) const;
  // Sets a flag of this rank's segment.
  void post(Flag* flag, std::uint64_t value) const { cpu::post(flag, value, &control().sleepers.value); }
  // Call this after store_then_look on a flag that `peer` watches.
  void ring_bell(int peer) const;
  // Sleeps until a peer rings this rank's bell, or a few milliseconds have passed. `look` is called once the bell is
  // active, and returns whether there is work already.
  template <typename Look>
  void sleep_by_bell(const Look& look) const;
  const WaitPolicy& wait_policy() const { return wait_policy_; }

  // Publishes the collective that this rank has begun; compare_calls compares it, without waiting, with the peers' call
  // of the same number, so that a mismatch is also found between ranks that do not wait for each other.
  void begin_call(const Call& call, const Signature& signature);
  void compare_calls() const;
  void end_call() const { store_release(&control().ended.value, sequence_ + 1); }
  // Ends the communicator because a peer made a different call, and throws an error with each rank's call.
  [[noreturn]] void report_mismatch() const;

  Deadline deadline(const Call& call) const;
  // Whether the peer has ended: its process has exited, or it has closed the communicator.
  bool is_gone(int peer) const;
  // Why the peer is gone, such as "its process has exited".
  std::string why_gone(int peer) const;
  // Returns for instance "rank 1 (process 42 on node7)".
  std::string named(int peer) const;
  // Of several ranks that are gone, returns the cause: one whose process has exited without closing, else the first
  // that closed; others may have closed because of it. `in_call`: considers only ranks that the current collective
  // needs.
  int cause_of(int gone, bool in_call) const;
  // Publishes the rank that this rank waits for; below 0: none.
  void wait_for(int peer) const { store_release(&control().waiting.value, static_cast<std::uint64_t>(peer + 1)); }
  // Returns why a peer does not continue, such as ", which waits for rank 2 (process 43 on node7), which is stopped by
  // a signal"; may be empty.
  std::string held_up_by(int peer) const;
  // Whether a peer waits for a message of this rank, directly or through other ranks that do.
  bool waits_in_circle(int peer) const;
  // Returns the last collective that the peer has begun, such as "all_gather #4 (train.py:77)"; or "no call".
  std::string last_call_of(int peer) const;

  // Ends every wait of every rank. All ranks report the first reason.
  void abort(const std::string& reason, ErrorCode code) const;
  bool aborted() const { return load_acquire(&control().abort.value) != 0; }
  // Returns the reason, once a rank has written it; empty and kAborted without one.
  std::string why_aborted() const;
  ErrorCode aborted_as() const;
  // Throws the reason if the group was aborted.
  void check_abort(const Call& call) const;
  // Aborts the group because a signal ends this rank's call.
  void interrupt(const char* call) const;
  // Whether the caller is a signal handler that a wait of this group has called.
  bool runs_handler() const { return signals_.runs_this(); }
  // Aborts the group with `message`, and throws the group's reason, which may be another rank's earlier one.
  [[noreturn]] void fail_group(const Call& call, ErrorCode code, const std::string& message) const;
  // Polls for signals if the time `next` has come, and advances it; throws if a signal ends this rank's call. Returns
  // whether it polled.
  bool check_interrupt(const Call& call, Clock::time_point& next) const;
  void check_lost(const Call& call) const;
  // After an abort: waits until no peer works in this rank's buffers; see Heap::detach.
  bool wait_peers_idle() const;
  // Marks this rank as closed.
  void leave() const;

  // See Engine::agree_on_shrink.
  std::vector<std::string> agree_on_shrink(const std::string& payload, const std::vector<int>& members,
                                           std::int64_t limit_ms);

  std::atomic<std::int64_t> timeout_ms;

  // Publishes an arena of visible memory; returns its number.
  int add_arena(const SharedMemory& memory);

 private:
  friend class LongWait;
  struct Peer {
    std::shared_ptr<SharedMemory> segment;
    std::shared_ptr<const Process> process;  // null: this process
    Board board;
    int pid = 0;
    std::vector<SharedMemory> arenas;
  };

  void attach(int peer, const std::string& handle);
  void attach_all(const std::vector<std::string>& handles);
  void await_attached();
  // Throws if a rank that this call needs is gone, or the call's limit has passed.
  template <typename HasCome>
  void check_peers(int peer, const Deadline& deadline, const HasCome& has_come) const;
  [[noreturn]] void report_timeout(int peer, const Deadline& deadline) const;
  bool is_exited(int peer) const { return peers_[peer].process && peers_[peer].process->exited(); }
  bool is_stopped(int peer) const { return peers_[peer].process && peers_[peer].process->stopped(); }
  bool holds_up(int peer) const;
  // Throws the reason for which the group was aborted.
  [[noreturn]] void raise_end(Op op) const;
  std::string call_here() const;
  PartyPlace party_of(int peer) const;
  WaitFacts facts_of(WaitKind kind, int peer, const char* site) const;
  const LoggedCall& logged(int peer, std::uint64_t sequence) const;
  bool has_begun(int peer, std::uint64_t sequence) const;
  void record_site() const;
  void await_call_sites(std::uint64_t sequence) const;
  std::vector<Caller> callers(std::uint64_t sequence) const;
  AbortState& abort_state() const { return (peers_[0].segment ? control(0) : control()).abort_state; }
  bool claim_abort_state(std::uint64_t from) const {
    return claim(&abort_state().state, from, kWriters + static_cast<std::uint64_t>(rank_));
  }
  const AbortState* written_reason() const;
  void set_abort_flags() const;
  void write_reason(const std::string& reason, ErrorCode code) const;
  void check_signals() const;
  bool has_come(int peer, std::uint64_t round) const;
  std::vector<bool> agree(std::uint64_t round, std::int64_t limit_ms);

  const int rank_, world_size_;
  const SegmentLayout layout_;
  const std::shared_ptr<SharedMemory> mine_;
  std::vector<Peer> peers_;
  std::shared_ptr<Flag> waited_;  // ns that collectives waited for each peer; null: not counted
  const std::shared_ptr<WaitGraph> graph_;
  mutable WaitGraph::Member member_;
  WaitPolicy wait_policy_{};
  bool shares_address_space_ = false;
  bool connected_ = false;
  trace::Origin origin_;
  std::uint64_t sequence_ = 0, logged_ = 0;  // of the collective that this rank executes
  mutable SignalHandling signals_;
  bool disowned_ = false;
  int num_arenas_ = 0;
  std::mutex arenas_mutex_;
  std::uint64_t round_ = 0;  // number of agree_on_shrink calls
  bool left_out_ = false;    // the others decided without this rank: it may join them again, but not decide alone
  std::mutex shrink_mutex_;
};

template <typename HasCome>
void LongWait::check(const HasCome& has_come) {
  const auto now = Clock::now();
  if (next_ == Clock::time_point{}) next_ = now + group_.graph_->long_wait();
  if (entry_) group_.graph_->abort_if_reported(entry_);
  if (now >= next_) search(now, has_come);
}

template <typename Look>
void Group::sleep_by_bell(const Look& look) const {
  Control& c = control();
  fetch_add(&c.bell_sleepers.value, 1);
  const std::uint64_t rung = load_after_store(&c.doorbell.value);
  if (!look()) futex_wait(&c.doorbell.value, rung, 20000);
  fetch_add(&c.bell_sleepers.value, static_cast<std::uint64_t>(-1));
}

}  // namespace ringcomm::cpu
