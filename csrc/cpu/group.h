// The connected segments of one communicator: who is where, how to wait for a peer and how to tell it something.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/engine.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/link.h"
#include "core/shm.h"
#include "core/signature.h"
#include "core/trace.h"
#include "cpu/process.h"
#include "cpu/segment.h"
#include "cpu/wait.h"
#include "cpu/wait_graph.h"

namespace ringcomm::cpu {

// The limit of one call. The clock is first read when a wait turns out to be long.
struct Deadline {
  const Call* call;
  std::atomic<std::int64_t> timeout_ms;
  mutable Clock::time_point end{};

  bool passed() const {
    const auto now = Clock::now();
    if (end == Clock::time_point{}) end = now + std::chrono::milliseconds(timeout_ms);
    return now > end;
  }
};

class Group;

// A wait that tells the other ranks of itself once it has become long, and finds out whether it can ever end.
class LongWait {
 public:
  // With a limit that is short, or for any rank, it tells nothing. `what`: see WaitGraph::Entry.
  LongWait(const Group& group, WaitKind kind, int peer, std::int64_t limit_ms, const void* what, const char* site = "")
      : group_(group), kind_(kind), peer_(peer), limit_ms_(limit_ms), what_(what), site_(site) {}
  ~LongWait();
  LongWait(const LongWait&) = delete;

  // Call it now and then, before whether the communicator was aborted or a rank was lost: a deadlock ends it.
  template <typename HasCome>
  void check(const HasCome& has_come);

 private:
  void look(Clock::time_point now, const std::function<bool()>& has_come);

  const Group& group_;
  const WaitKind kind_;
  const int peer_;
  const std::int64_t limit_ms_;
  const void* const what_;
  const char* const site_;
  Clock::time_point next_{};
  WaitGraph::Entry* entry_ = nullptr;
  std::vector<WaitGraph::Seen> seen_;
};

class Group {
 public:
  Group(int rank, int world_size, const EngineOptions& options);
  ~Group();
  // In a forked child: what is shared stays as it is.
  void disown() { disowned_ = true; }
  // What the wait graph asks about this rank; before it is connected.
  void set_activity(std::function<WaitGraph::Activity()> activity) { member_.activity = std::move(activity); }
  // Before every call.
  void note_caller() const { graph_->note_caller(member_); }
  // The engine goes: nobody asks it any more.
  void forget() const { graph_->remove(member_); }

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  std::size_t slot_bytes() const { return layout_.slot_bytes; }
  std::size_t p2p_slot_bytes() const { return layout_.p2p_slot_bytes; }
  bool shares_address_space() const { return shares_address_space_; }
  bool connected() const { return connected_; }
  const trace::Origin& origin() const { return origin_; }

  std::string handle() const;
  void connect(const std::vector<std::string>& handles, std::int64_t timeout_ms);

  // What rank `peer` writes and this rank reads (peer may be this rank).
  const Board& board(int peer) const { return peers_[peer].board; }
  Board p2p_board(int source, int destination) const;
  Control& control(int peer) const { return *reinterpret_cast<Control*>(peers_[peer].segment->data()); }
  Control& control() const { return *reinterpret_cast<Control*>(mine_->data()); }
  // An address of `peer`'s visible memory, in this process.
  char* resolve(int peer, const Location& location);

  // Waits until a flag in `peer`'s segment reaches `target`.
  void wait(int peer, const Flag* flag, std::uint64_t target, const Deadline& deadline) const;
  // Sets a flag of this rank's segment.
  void post(Flag* flag, std::uint64_t value) const { cpu::post(flag, value, &control().sleepers.value); }
  // Call it after a flag that `peer` watches was set with store_then_look.
  void ring_bell(int peer) const;
  // Sleeps until somebody rings this rank's bell, or a few milliseconds have passed. `look`, called once the bell can
  // be heard, says whether there is something to do already.
  template <typename Look>
  void sleep_by_bell(const Look& look) const;
  const Patience& patience() const { return patience_; }

  // Tells the peers which collective this rank is in, and looks, without waiting, whether theirs of that number is the
  // same: a mismatch is found also between ranks that do not wait for each other.
  void begin_call(const Call& call, const Signature& signature);
  void compare_calls() const;
  void end_call() const { store_release(&control().ended.value, sequence_ + 1); }
  // Ends the communicator because a peer called something else, and throws what each rank called.
  [[noreturn]] void differ() const;

  Deadline deadline(const Call& call) const;
  // Whether the peer takes part in nothing any more: its process has ended, or it has closed the communicator.
  bool is_gone(int peer) const;
  // "its process has exited", or what else became of it.
  std::string fate_of(int peer) const;
  // "rank 1 (process 42 on node7)".
  std::string named(int peer) const;
  // Of several ranks that are gone the one that had no choice, or was the first to close: others may have closed
  // because of it. `in_call`: of those that the collective here needs.
  int cause_of(int gone, bool in_call) const;
  // For whom this rank waits, for the others to see; below 0: for nobody.
  void wait_for(int peer) const { store_release(&control().waiting.value, static_cast<std::uint64_t>(peer + 1)); }
  // ", which waits for rank 2 (process 43 on node7), which is stopped by a signal": what holds up a peer; may be empty.
  std::string held_up_by(int peer) const;
  // "all_gather #4 (1000 x float32, train.py:77)", the last collective that the peer has begun; "no call".
  std::string last_call_of(int peer) const;

  // Ends every wait of every rank. The first reason is everyone's.
  void abort(const std::string& reason, ErrorCode code) const;
  bool aborted() const { return load_acquire(&control().abort.value) != 0; }
  // Once a rank has written the reason; empty and kAborted without one.
  std::string why_aborted() const;
  ErrorCode aborted_as() const;
  // Throws the reason if the group was aborted.
  void check_abort(const Call& call) const;
  // Aborts the group: a signal ends the call that this rank is in.
  void interrupt(const char* call) const;
  // Whether a signal's handler, which a wait here lets run, is what calls.
  bool runs_handler() const { return signals_.runs_this(); }
  // Aborts the group with `message`, and throws the reason, which another rank may have been the first to give.
  [[noreturn]] void give_up(const Call& call, ErrorCode code, const std::string& message) const;
  // Looks for signals, from `next` on, which it sets; throws if one ends this rank's call.
  void check_interrupt(const Call& call, Clock::time_point& next) const;
  void check_lost(const Call& call) const;
  // After an abort: waits until no peer works in place; see Heap::detach.
  bool await_hands_off() const;
  // This rank takes part in nothing any more.
  void leave() const;

  // See Engine::regroup.
  std::vector<std::string> regroup(const std::string& message, const std::vector<int>& members, std::int64_t limit_ms);

  std::atomic<std::int64_t> timeout_ms;

  // Announces an arena of visible memory; returns its number.
  int add_arena(const SharedMemory& memory);

 private:
  friend class LongWait;
  struct Peer {
    std::shared_ptr<SharedMemory> segment;
    std::shared_ptr<const Process> process;  // null: this one
    Board board;
    int pid = 0;
    std::vector<SharedMemory> arenas;
  };

  void attach(int peer, const std::string& handle);
  void attach_all(const std::vector<std::string>& handles);
  void await_attached(std::int64_t timeout_ms);
  // Throws where a rank that this call needs is gone, or the call's limit has passed.
  template <typename HasCome>
  void look_around(int peer, const Deadline& deadline, const HasCome& has_come) const;
  [[noreturn]] void too_late(int peer, const Deadline& deadline) const;
  bool is_exited(int peer) const { return peers_[peer].process && peers_[peer].process->exited(); }
  bool is_stopped(int peer) const { return peers_[peer].process && peers_[peer].process->stopped(); }
  bool holds_up(int peer) const;
  // Throws why the group was aborted.
  [[noreturn]] void raise_end(Op op) const;
  std::string call_here() const;
  PartyPlace party_of(int peer) const;
  WaitFacts facts_of(WaitKind kind, int peer, const char* site) const;
  const LoggedCall& logged(int peer, std::uint64_t sequence) const;
  bool has_begun(int peer, std::uint64_t sequence) const;
  void state_call() const;
  void await_statements(std::uint64_t sequence) const;
  std::vector<Caller> callers(std::uint64_t sequence) const;
  Verdict& verdict() const { return (peers_[0].segment ? control(0) : control()).verdict; }
  bool claim_verdict(std::uint64_t from) const {
    return claim(&verdict().state, from, kWriters + static_cast<std::uint64_t>(rank_));
  }
  const Verdict* passed() const;
  void announce_end() const;
  void pass(const std::string& reason, ErrorCode code) const;
  void check_signals() const;
  bool has_come(int peer, std::uint64_t round) const;
  std::vector<bool> agree(std::uint64_t round, std::int64_t limit_ms);

  const int rank_, world_size_;
  const SegmentLayout layout_;
  const std::shared_ptr<SharedMemory> mine_;
  std::vector<Peer> peers_;
  const std::shared_ptr<WaitGraph> graph_;
  mutable WaitGraph::Member member_;
  Patience patience_{};
  bool shares_address_space_ = false;
  bool connected_ = false;
  trace::Origin origin_;
  std::uint64_t sequence_ = 0, logged_ = 0;  // of the collective that this rank is in
  mutable SignalHandling signals_;
  bool disowned_ = false;
  int num_arenas_ = 0;
  std::mutex arenas_mutex_;
  std::uint64_t round_ = 0;  // of regroup
  bool left_out_ = false;    // the others have decided without this rank: it may join them again, but not decide alone
  std::mutex regroup_mutex_;
};

template <typename HasCome>
void LongWait::check(const HasCome& has_come) {
  const auto now = Clock::now();
  if (next_ == Clock::time_point{}) next_ = now + group_.graph_->long_wait();
  if (entry_) group_.graph_->hear(entry_);
  if (now >= next_) look(now, has_come);
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
