// The connected segments of one communicator: who is where, how to wait for a peer and how to tell it something.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/engine.h"
#include "core/error.h"
#include "core/link.h"
#include "cpu/segment.h"
#include "cpu/shm.h"
#include "cpu/wait.h"

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

class Group {
 public:
  Group(int rank, int world_size, const EngineOptions& options);
  ~Group();
  // In a forked child: what is shared stays as it is.
  void disown() { disowned_ = true; }

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  std::size_t slot_bytes() const { return layout_.slot_bytes; }
  std::size_t p2p_slot_bytes() const { return layout_.p2p_slot_bytes; }
  bool shares_address_space() const { return shares_address_space_; }
  bool connected() const { return connected_; }

  std::string handle() const;
  void connect(const std::vector<std::string>& handles, std::int64_t timeout_ms);

  // What rank `peer` writes and this rank reads (peer may be this rank).
  const Board& board(int peer) const { return peers_[peer].board; }
  Board p2p_board(int source, int destination) const;
  Control& control(int peer) const { return *reinterpret_cast<Control*>(peers_[peer].segment->data()); }
  Control& control() const { return *reinterpret_cast<Control*>(mine_->data()); }
  int pid(int peer) const { return peers_[peer].pid; }
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
  void begin_call(std::uint64_t sequence, std::uint64_t hash);
  void compare_calls(const Call& call) const;

  Deadline deadline(const Call& call) const;
  // Whether the peer's process is gone. A zombie counts as alive; the deadline ends that wait.
  bool has_exited(int peer) const;
  void abort(const std::string& reason) const;
  bool aborted() const { return load_acquire(&control().abort.value) != 0; }
  // The reason given to the abort, once a rank has written it; empty without one.
  std::string why_aborted() const;
  // Throws if the group was aborted.
  void check_abort(const Call& call) const;
  // Aborts the group with `message` and throws it, with the advice that goes with every abort.
  [[noreturn]] void give_up(ErrorCode code, const std::string& message) const;

  std::atomic<std::int64_t> timeout_ms;

  // Announces an arena of visible memory; returns its number.
  int add_arena(const SharedMemory& memory);

 private:
  struct Peer {
    std::shared_ptr<SharedMemory> segment;
    Board board;
    int pid = 0;
    std::vector<SharedMemory> arenas;
  };

  void attach(int peer, const std::string& handle);
  void await_attached(std::int64_t timeout_ms);
  std::string missing(int peer, const Call& call) const;

  const int rank_, world_size_;
  const SegmentLayout layout_;
  const std::shared_ptr<SharedMemory> mine_;
  std::vector<Peer> peers_;
  Patience patience_{};
  bool shares_address_space_ = false;
  bool connected_ = false;
  std::uint64_t sequence_ = 0, logged_ = 0;  // of the collective that this rank is in
  bool disowned_ = false;
  int num_arenas_ = 0;
  std::mutex arenas_mutex_;
};

template <typename Look>
void Group::sleep_by_bell(const Look& look) const {
  Control& c = control();
  fetch_add(&c.bell_sleepers.value, 1);
  const std::uint64_t rung = load_after_store(&c.doorbell.value);
  if (!look()) futex_wait(&c.doorbell.value, rung, 20000);
  fetch_add(&c.bell_sleepers.value, static_cast<std::uint64_t>(-1));
}

}  // namespace ringcomm::cpu
