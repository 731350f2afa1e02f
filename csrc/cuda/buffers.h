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
// is known by its address, size and id, so that one that was freed is not taken for its successor. What a graph has
// captured stays open for ever.
//
// What cudaMalloc gave is a region of the table that kernels look into. Of virtual memory each chunk of physical memory
// is an allocation, and all chunks in a window of the owner's addresses are one region: a peer maps them into a range
// of its own as they lie in the window, so that a buffer on several of them is in one piece there too.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/args.h"
#include "cuda/mailbox.h"
#include "cuda/memory.h"
#include "cuda/vmm.h"

namespace ringcomm::cuda {

inline constexpr std::uint64_t kWindowBytes = std::uint64_t{64} << 30;

// What cudaMalloc gave, around an address, or a chunk of virtual memory. No bytes: the address lies in memory of
// another kind, which neither handles nor peer access reach.
struct Allocation {
  std::uint64_t base = 0, nbytes = 0;
  std::uint64_t id = 0;  // no other allocation of this process has had it, or has it while `chunk` is held
  std::shared_ptr<const VmmReference> chunk = nullptr;  // null: from cudaMalloc

  std::uint64_t end() const { return base + nbytes; }
  bool operator==(const Allocation& other) const {
    return base == other.base && nbytes == other.nbytes &&
           (id == other.id || RINGCOMM_FAULT == Fault::kMappingOutlivesMemory) && !chunk == !other.chunk;
  }
  bool overlaps(const Allocation& other) const { return base < other.end() && other.base < end(); }
  // Where the region begins that peers find it in.
  std::uint64_t region_base() const { return chunk ? base / kWindowBytes * kWindowBytes : base; }
};
Allocation allocation_of(std::uint64_t address);
// Whether [data, data + nbytes) lies in one allocation of cudaMalloc's, which peer access reaches.
bool is_from_cuda_malloc(const void* data, std::size_t nbytes);

// Says, once in this process, that a buffer of a call goes through the staging areas, and why.
void say_staged(const char* call, int rank, const std::string& got);
inline constexpr const char* kForeignMemory = "memory that cudaMalloc did not give, as it does for torch by default";
inline constexpr const char* kUnexportableMemory =
    "virtual memory that was not created to be passed to other processes";
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
    kOffered,    // some peers have yet to answer
    kVisible,    // as of call `from`
    kWithdrawn,  // some peers have yet to close it
    kRefused,    // it has no handle, or a peer could not open it: not to be offered before call `from`
  };
  struct Own {
    State state = State::kOffered;
    bool refused = false, captured = false;
    int region = -1;  // none: it is refused
    int refusals = 0;
    Allocation allocation;
    MemoryHandle handle;
    std::uint64_t from = 0;            // kWithdrawn: the first call that does not use it
    std::uint32_t told = 0, open = 0;  // by peer: has the offer, or the withdrawal; has yet to answer
  };
  struct Region {
    std::uint64_t base = 0;
    bool window = false;  // may have several allocations
    int users = 0;        // allocations; 0: it is free
  };
  struct Opened {
    int peer, region;
    Identity identity;
    std::uint64_t until;                // the first call that does not use it
    std::shared_ptr<void> memory;       // null: of this process
    std::shared_ptr<VmmWindow> window;  // that it is mapped into, of another process
  };
  using Owns = std::multimap<std::uint64_t, Own>;  // by the address

  std::uint32_t all_peers() const;
  Owns::iterator find(const Identity& identity);
  Owns::iterator find(const Allocation& allocation);
  bool show(const Allocation& allocation, bool may_offer, const char* call, Own*& visible);
  void offer(const Allocation& allocation, const char* call);
  void make_offer(Own& own);
  int take_region(const Allocation& allocation);
  void forget(Owns::iterator own);
  void is_gone(Owns::iterator own);
  void withdraw(Own& own);
  bool is_blocked(const Own& own, int peer) const;
  void withdraw_what_is_gone();
  void hear_taken(const Mail& mail, const char* call);
  void hear_dropped(const Mail& mail);
  void open(const Mail& offer);
  void map(const MemoryHandle& handle, int fd, Opened& opened);
  void hear_withdrawn(const Mail& mail);
  void answer(int peer, const Identity& subject, Mail::Kind kind, bool done);
  void send(Mailbox& mailbox);
  bool tell(Mailbox& mailbox, Own& own, int peer);

  const int rank_, device_;
  const std::vector<Peer> peers_;
  const std::function<void(int, int, char*)> set_;
  mutable std::mutex mutex_;
  std::uint64_t calls_ = 0;
  std::uint64_t looked_ = ~std::uint64_t{0};  // the last call before which we looked for what is gone
  Owns owns_;
  std::uint64_t looked_at_ = 0;  // the address of the last one that was looked at
  bool has_news_ = false;        // that some peer has yet to be told
  std::array<Region, kMaxBuffers> regions_;
  std::list<Opened> opened_;
  std::deque<std::pair<int, Mail>> answers_;  // (to, what) that are not sent yet
  std::array<int, kMaxRanks> waits_{};        // by peer: how many letters of ours it has yet to answer
};

}  // namespace ringcomm::cuda
