// The ranks that survive an abort meet in the segments that they still have mapped, including those of dead ranks.
#include <unistd.h>

#include <cstring>

#include "core/error.h"
#include "core/schedule.h"
#include "cpu/group/state.h"

namespace ringcomm::cpu {

bool Group::has_come(int peer, std::uint64_t round) const { return load_acquire(&control(peer).shrink.round) >= round; }

void Group::check_signals() const {
  if (interrupted())
    fail(ErrorCode::kAborted, "shrink: rank ", rank_, " was interrupted by a signal; call shrink again");
}

std::vector<std::string> Group::agree_on_shrink(const std::string& payload, const std::vector<int>& members,
                                                std::int64_t limit_ms) {
  const std::lock_guard<std::mutex> lock(shrink_mutex_);
  constexpr std::size_t kMost = sizeof control().shrink.entries[0].payload;
  if (payload.size() > kMost)
    fail(ErrorCode::kInvalid, "shrink: rank ", rank_, " expected a message of at most ", kMost, " bytes, got ",
         payload.size());
  // Odd rounds find the ranks that are there, even rounds exchange their payloads. So an attempt that fails halfway is
  // over for all ranks.
  round_ += (round_ % 2 == 0) == members.empty() ? 1 : 2;
  const std::uint64_t round = round_;
  auto& mine = control().shrink.entries[round % 2];
  mine.round = round;
  mine.nbytes = static_cast<std::uint32_t>(payload.size());
  std::memcpy(mine.payload, payload.data(), payload.size());
  store_release(&control().shrink.round, round);

  std::vector<bool> taken(world_size_, false);
  if (members.empty()) {
    taken = agree(round, limit_ms);
  } else {
    const auto end = Clock::now() + std::chrono::milliseconds(limit_ms);
    for (const int peer : members) {
      for (; !has_come(peer, round); usleep(200)) {
        check_signals();
        if (is_gone(peer) && !has_come(peer, round))
          fail(ErrorCode::kRankLost, "shrink: rank ", rank_, " expected ", named(peer), ", but ", why_gone(peer),
               "; call shrink again");
        if (Clock::now() > end)
          fail(ErrorCode::kTimeout, "shrink: rank ", rank_, " expected ", named(peer), " within ", limit_ms / 1000.0,
               " s, got no answer; see whether it has stalled, and call shrink again");
      }
      taken[peer] = true;
    }
  }
  std::vector<std::string> payloads(world_size_);
  for (int peer = 0; peer < world_size_; ++peer) {
    const auto& theirs = control(peer).shrink.entries[round % 2];
    if (!taken[peer]) continue;
    payloads[peer].assign(theirs.payload, smaller(theirs.nbytes, sizeof theirs.payload));
    if (theirs.round != round || load_acquire(&control(peer).shrink.round) >= round + 2)
      fail(ErrorCode::kRankLost, "shrink: rank ", rank_, " expected ", named(peer),
           " in the same attempt, but it has begun another; call shrink again");
  }
  return payloads;
}

// The first rank that has seen every other rank arrive or exit decides for all, by one atomic claim, since other ranks
// may have seen something else. The decision stays valid if that rank dies.
std::vector<bool> Group::agree(std::uint64_t round, std::int64_t limit_ms) {
  const auto end = Clock::now() + std::chrono::milliseconds(limit_ms);
  Flag* decider = &control(0).decider.value;
  const auto decided = [&] { return load_acquire(decider) >> 16 >= round; };
  for (int peer = 0; peer < world_size_; ++peer)
    for (; !decided() && !has_come(peer, round) && !is_gone(peer) && Clock::now() < end; usleep(200)) check_signals();
  const auto alone = [&] {
    for (int peer = 0; peer < world_size_; ++peer)
      if (peer != rank_ && !is_gone(peer)) return false;
    return true;
  };
  for (; left_out_ && !decided() && !alone() && Clock::now() < end; usleep(200)) check_signals();
  auto& proposal = control().shrink.entries[round % 2].members;
  std::memset(proposal, 0, sizeof proposal);
  for (int peer = 0; peer < world_size_; ++peer)
    if (has_come(peer, round) && !is_gone(peer)) proposal[peer / 64] |= 1ull << (peer % 64);
  for (std::uint64_t seen = load_acquire(decider); !left_out_ && seen >> 16 < round; seen = load_acquire(decider))
    claim(decider, seen, round << 16 | static_cast<std::uint64_t>(rank_ + 1));
  const std::uint64_t decision = load_acquire(decider);
  std::vector<bool> taken(world_size_, false);
  if (decision >> 16 == round) {
    const auto& members = control(static_cast<int>((decision & 0xffff) - 1)).shrink.entries[round % 2].members;
    for (int peer = 0; peer < world_size_; ++peer) taken[peer] = members[peer / 64] >> (peer % 64) & 1;
  }
  left_out_ = !taken[rank_];
  if (left_out_)
    fail(ErrorCode::kRankLost, "shrink: rank ", rank_, " expected to be among the ranks that go on, but came after ",
         limit_ms / 1000.0, " s or more, when the others had decided without it; start it anew");
  return taken;
}

}  // namespace ringcomm::cpu
