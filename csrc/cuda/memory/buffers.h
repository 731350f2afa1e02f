// Makes allocations of the user, such as those of ordinary tensors, visible to ranks in other processes. A rank offers
// an allocation to its peers when a call first uses it, and stages until all of them have opened it:
//
//   owner                                       peer
//   offers it                                   opens it, and answers with the number of its next call
//   from the largest of these numbers on:       reads and writes it at the published locations
//     publishes where its buffers lie
//   finds it freed: withdraws it as of a call   closes it at a later call, when none of its kernels runs, and answers
//   all have answered: the region is free
//
// These messages are sent while a rank prepares a call, and no rank waits for an answer; what does not fit into the
// queue of a peer's socket is sent at a later call. All ranks make the same calls in the same order, so they number
// them alike. An allocation is identified by its address, size and id, so that a freed one is not confused with its
// successor at the same address. Memory that a graph has captured stays open for ever.
//
// An allocation of cudaMalloc has a region of its own in the table that kernels read. Of virtual memory, each chunk of
// physical memory is an allocation, and all chunks in one window of the owner's addresses share a region: a peer maps
// them at the same offsets into an address range of its own, so that a buffer on several chunks is contiguous there
// too.
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

#include "cuda/device/args.h"
#include "cuda/memory/control_socket.h"
#include "cuda/memory/ipc.h"
#include "cuda/memory/vmm.h"

namespace ringcomm::cuda {

inline constexpr std::uint64_t kWindowBytes = std::uint64_t{64} << 30;

// The allocation of cudaMalloc around an address, or the chunk of virtual memory there. nbytes is 0 if the address lies
// in memory of another kind, which neither handles nor peer access reach.
struct Allocation {
  std::uint64_t base = 0, nbytes = 0;
  std::uint64_t id = 0;                                 // unique in this process for ever, or while `chunk` is held
  std::shared_ptr<const VmmReference> chunk = nullptr;  // null: from cudaMalloc

  std::uint64_t end() const { return base + nbytes; }
  bool operator==(const Allocation& other) const {
    return base == other.base && nbytes == other.nbytes &&
           (id == other.id || RINGCOMM_FAULT == Fault::kMappingOutlivesMemory) && !chunk == !other.chunk;
  }
  bool overlaps(const Allocation& other) const { return base < other.end() && other.base < end(); }
  // The beginning of the region in which peers find it.
  std::uint64_t region_base() const { return chunk ? base / kWindowBytes * kWindowBytes : base; }
};
Allocation allocation_of(std::uint64_t address);
// Whether [data, data + nbytes) lies in one allocation of cudaMalloc, which peer access reaches.
bool is_from_cuda_malloc(const void* data, std::size_t nbytes);

// Reports, once per process, that a buffer of a call goes through the staging areas, and why.
void warn_staged(const char* call, int rank, const std::string& got);
inline constexpr const char* kForeignMemory = "memory that cudaMalloc did not give, as it does for torch by default";
inline constexpr const char* kUnexportableMemory =
    "virtual memory that was not created to be passed to other processes";
// Smaller buffers are staged, in a window or two, because opening their memory would cost the peers more.
inline constexpr std::size_t kLeastShown = 64u << 10;

class Buffers {
 public:
  struct Peer {
    ControlSocket::Address control;
    bool here = false;  // in this process, where it uses the same address
  };
  // `peers`: all ranks. set(peer, region, base): from now on this rank's kernels find that region of the peer at
  // `base`.
  Buffers(int rank, int device, std::vector<Peer> peers, std::function<void(int, int, char*)> set);

  // Called before each call, with its name: receives and sends messages.
  void attend(ControlSocket& control, const char* call);
  // Notes that the call of the last attend() has been launched.
  void called();
  // Where a buffer of the next call lies for the peers. The first use of an allocation offers it.
  Location locate(const void* data, std::size_t nbytes, bool captured, const char* call);
  // Whether there are mappings of peers' memory that no call of this rank uses any more.
  bool has_unused() const;
  // Closes them.
  void close_unused();
  // How many allocations of this rank the peers have opened.
  std::size_t num_visible() const;

 private:
  enum class State {
    kOffered,    // some peers have yet to answer
    kVisible,    // as of call `from`
    kWithdrawn,  // some peers have yet to close it
    kRefused,    // it has no handle, or a peer could not open it; not to be offered before call `from`
  };
  struct OwnAllocation {
    State state = State::kOffered;
    bool refused = false, captured = false;
    int region = -1;  // none: it is refused
    int refusals = 0;
    Allocation allocation;
    MemoryHandle handle;
    std::uint64_t from = 0;                // kWithdrawn: the first call that does not use it
    std::uint32_t notified = 0, open = 0;  // bits by peer: was sent the offer or withdrawal; has yet to answer it
  };
  struct Region {
    std::uint64_t base = 0;
    bool window = false;  // may have several allocations
    int users = 0;        // allocations; 0: it is free
  };
  struct PeerAllocation {
    int peer, region;
    Identity identity;
    std::uint64_t until;                // the first call that does not use it
    std::shared_ptr<void> memory;       // null: of this process
    std::shared_ptr<VmmWindow> window;  // of another process: the window that it is mapped into
  };
  using OwnAllocations = std::multimap<std::uint64_t, OwnAllocation>;  // by address

  std::uint32_t all_peers() const;
  OwnAllocations::iterator find(const Identity& identity);
  OwnAllocations::iterator find(const Allocation& allocation);
  bool show(const Allocation& allocation, bool may_offer, const char* call, OwnAllocation*& visible);
  void offer(const Allocation& allocation, const char* call);
  void make_offer(OwnAllocation& own);
  int take_region(const Allocation& allocation);
  void forget(OwnAllocations::iterator own);
  void handle_freed(OwnAllocations::iterator own);
  void withdraw(OwnAllocation& own);
  bool is_blocked(const OwnAllocation& own, int peer) const;
  void withdraw_freed();
  void handle_taken(const ControlMessage& message, const char* call);
  void handle_dropped(const ControlMessage& message);
  void open(const ControlMessage& offer);
  void map(const MemoryHandle& handle, int fd, PeerAllocation& opened);
  void handle_withdrawn(const ControlMessage& message);
  void answer(int peer, const Identity& subject, ControlMessage::Kind kind, bool done);
  void send(ControlSocket& control);
  bool notify(ControlSocket& control, OwnAllocation& own, int peer);

  const int rank_, device_;
  const std::vector<Peer> peers_;
  const std::function<void(int, int, char*)> set_;
  mutable std::mutex mutex_;
  std::uint64_t calls_ = 0;
  std::uint64_t checked_call_ = ~std::uint64_t{0};  // the last call before which freed allocations were looked for
  OwnAllocations allocations_;
  std::uint64_t last_checked_ = 0;  // the address of the last allocation that was checked
  bool has_unsent_ = false;         // some peer has yet to be sent something
  std::array<Region, kMaxBuffers> regions_;
  std::list<PeerAllocation> opened_;
  std::deque<std::pair<int, ControlMessage>> answers_;  // (peer, message) not sent yet
  std::array<int, kMaxRanks> unanswered_{};             // by peer: how many messages it has yet to answer
};

}  // namespace ringcomm::cuda
