// Allocations of the caller's own, such as those behind ordinary tensors, that ranks in other processes come to see. A
// rank offers an allocation to its peers the first time that a call uses it, and stages until all of them can reach it:
//
//   owner                                       peer
//   offers it                                   opens it, and answers with the number of the call that it makes next
//   from the greatest of these numbers on:      reads and writes it where the announcement says
//     announces where its buffers lie
//   it is gone: withdraws it as of a call       closes it at a later call, when none of its kernels runs, and answers
//   all have answered: the place is free
//
// This goes by mail, while a rank prepares a call, and nobody waits for an answer: what does not fit into a mailbox is
// sent at a later call. The ranks number their calls alike, for all make the same ones in the same order. An allocation
// is known by its address, size and buffer id, so that one that was freed is not taken for its successor. What a graph
// has captured stays open for ever.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/args.h"
#include "cuda/mailbox.h"
#include "cuda/memory.h"

namespace ringcomm::cuda {

// What cudaMalloc gave, around an address. No bytes: the address lies in memory of another kind, which neither handles
// nor peer access reach.
struct Allocation {
  std::uint64_t base = 0, nbytes = 0;
  std::uint64_t id = 0;  // no other allocation of this process has had it

  bool operator==(const Allocation& other) const {
    return base == other.base && nbytes == other.nbytes &&
           (id == other.id || RINGCOMM_FAULT == Fault::kMappingOutlivesMemory);
  }
  bool holds(std::uint64_t address, std::size_t count) const {
    return address >= base && address + count <= base + nbytes;
  }
};
Allocation allocation_of(const void* data);

// Says, once in this process, that a buffer of a call goes through the staging areas, and why.
void say_staged(const char* call, int rank, const std::string& got);
inline constexpr const char* kForeignMemory = "memory that cudaMalloc did not give, as it does for torch by default";
// Smaller buffers are staged, in a window or two: opening the memory would cost the peers more.
inline constexpr std::size_t kLeastShown = 64u << 10;

class Buffers {
 public:
  struct Peer {
    Mailbox::Address mailbox;
    bool here = false;  // in this process: it uses the same address
  };
  // `peers`: of all ranks. set(peer, region, base): from now on this rank's kernels find the region of the peer there.
  Buffers(int rank, int device, std::vector<Peer> peers, std::function<void(int, int, char*)> set);

  // Before each call, by its name.
  void attend(Mailbox& mailbox, const char* call);
  // The call that was attended to has been launched.
  void called();
  // Where a buffer of the next call lies for the peers. The first use of an allocation offers it.
  Location locate(const void* data, std::size_t nbytes, bool captured, const char* call);
  // Mappings of peers' memory that no call of this rank uses any more, and closing them.
  bool has_unused() const;
  void close_unused();
  // How many allocations of this rank the peers have opened.
  std::size_t num_visible() const;

 private:
  enum class State {
    kFree,
    kOffered,    // some peers have yet to answer
    kVisible,    // as of call `from`
    kWithdrawn,  // some peers have yet to close it
    kRefused,    // it has no handle, or a peer could not open it: not to be offered again
  };
  struct Own {
    State state = State::kFree;
    bool refused = false, captured = false;
    Allocation allocation;
    MemoryHandle handle;
    std::uint64_t from = 0;            // kWithdrawn: the first call that does not use it
    std::uint32_t told = 0, open = 0;  // by peer: has the offer, or the withdrawal; has yet to answer
  };
  struct Opened {
    int peer, region;
    Identity identity;
    std::shared_ptr<DeviceMemory> memory;  // null: of this process
    std::uint64_t until;                   // the first call that does not use it
  };

  std::uint32_t all_peers() const;
  Own* find(const Identity& identity);
  void offer(const Allocation& allocation, const char* call);
  void withdraw(Own& own);
  void withdraw_what_is_gone();
  void hear_taken(const Mail& mail, const char* call);
  void hear_dropped(const Mail& mail);
  void open(const Mail& offer);
  void hear_withdrawn(const Mail& mail);
  void answer(int peer, const Identity& subject, Mail::Kind kind, bool done);
  void send(Mailbox& mailbox);

  const int rank_, device_;
  const std::vector<Peer> peers_;
  const std::function<void(int, int, char*)> set_;
  mutable std::mutex mutex_;
  std::uint64_t calls_ = 0;
  std::uint64_t looked_ = ~std::uint64_t{0};  // the last call before which we looked for what is gone
  std::array<Own, kMaxBuffers> owns_;
  std::list<Opened> opened_;
  std::deque<std::pair<int, Mail>> answers_;  // (to, what) that are not sent yet
  std::uint32_t waits_ = 0;                   // by peer: has a letter of ours that it has not answered; one at a time
};

}  // namespace ringcomm::cuda
