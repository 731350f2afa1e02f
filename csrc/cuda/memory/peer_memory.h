// One rank's segment and those of its peers: where each rank runs, which memory all of them can access, and how every
// wait is ended.
//
//   PeerMemory(...)   allocates the segment, zeroed, and the host page; puts a pattern into the segment's probe lines
//   handle()          what the peers need; at most a few KiB of printable text
//   connect(handles)  opens every peer's segment, copies the patterns over the mapped pointers both ways and compares;
//                     returns once every rank has found them right, throws on every rank if one has not
//
// Memory of a peer in this process is accessed by its plain pointer. Memory that peers have opened stays valid until
// they have closed it, so ranks may be destroyed in any order.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/engine.h"
#include "core/error.h"
#include "core/link.h"
#include "core/pieces.h"
#include "cuda/device/args.h"
#include "cuda/memory/buffers.h"
#include "cuda/memory/control_socket.h"
#include "cuda/memory/handle.h"
#include "cuda/memory/ipc.h"
#include "cuda/runtime.h"
#include "runtime/registry.h"

namespace ringcomm::cuda {

// Bytes of the handle of an arena. All zeros: this rank could not allocate one.
inline constexpr std::size_t kArenaHandleBytes = sizeof(MemoryHandle);

class PeerMemory {
 public:
  PeerMemory(int rank, int world_size, int device, const EngineOptions& options);
  PeerMemory(int rank, int device, const Layout& layout, std::int64_t timeout_ms);
  ~PeerMemory();  // not collective; call it after the last kernel of this rank has ended
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  std::string handle() const;
  // Collective: waits for all ranks (at most the timeout of the options), so each rank calls it in a thread of its own.
  // `prepare` runs when the peers are known, before any rank returns; if it throws, every rank gets the error.
  void connect(const std::vector<std::string>& handles, const std::function<void()>& prepare = {});
  bool connected() const { return connected_; }
  // Settings that must be the same on all ranks, beside the layout; without spaces. Call it before handle().
  void set_settings(const std::string& settings) { settings_ = settings; }

  int rank() const { return rank_; }
  int world_size() const { return layout_.world_size; }
  int device() const { return device_; }
  const DeviceFacts& facts() const { return facts_; }
  const Layout& layout() const { return layout_; }

  // Peers, valid once connected.
  char* segment(int peer) const { return segments_[peer]; }
  RankArgs args() const;  // of this rank, for a launch
  char* region(int peer, int region) const { return bases_[peer * kMaxRegions + region]; }  // RankTable's, for the host
  HostPage* page() const;                                                                   // host address
  bool one_process() const { return one_process_; }
  bool one_device() const { return one_device_; }  // and in this process
  // Ranks of this process on this device, this one included, in ascending order.
  const std::vector<int>& local_ranks() const { return local_ranks_; }
  // The worst path between the devices of any two ranks; kUnknown before connect.
  Path::Kind worst_path() const { return worst_path_; }
  // Over all devices; the same on all ranks, because each rank plans for the fullest device.
  int most_ranks_of_a_device() const { return most_ranks_of_a_device_; }
  // Processes that have ranks on this device.
  int processes_on_device() const;
  const std::int8_t* ring_order() const { return ring_order_; }  // kMaxRanks entries; [position] = rank
  // The same on all ranks, different in every communicator.
  const std::string& identity() const { return identity_; }
  // Messages of calls. receive() takes the oldest one of a kind and sender whose call is not after `last`, within
  // `timeout_ms`.
  ControlSocket::SendResult send(int peer, const ControlMessage& message);
  bool receive(ControlMessage::Kind kind, int from, std::uint64_t last, int timeout_ms, ControlMessage& message);
  // Makes room in the socket's queue: keeps the messages that have come until they are received.
  void read_messages();
  const Process& process(int peer) const { return peers_[peer].handle.process; }
  // The stream on which stop() enqueues its writes to the peers.
  cudaStream_t stream() const { return stream_; }

  // How this rank accesses a peer, for display: "itself", "pointer", "ipc", "vmm".
  std::string reach(int peer) const;

  // To be called before each call, and after its launch; see Buffers.
  void attend(const char* call);
  void called();
  bool has_unused_mappings() const { return buffers_ && buffers_->has_unused(); }
  // Waits for the device. Call it only while no kernel of this rank runs: the kernel might wait for a peer that waits
  // for us.
  void close_unused_mappings();
  // Where [data, data + nbytes) lies for the peers in the next call. An address if one_device(), or if one_process()
  // and the memory lies in an own arena or comes from cudaMalloc; else region and offset if it lies in an own arena, or
  // in memory that all peers have opened; else not visible. `captured`: the call goes into a graph.
  Location locate(const void* data, std::size_t nbytes, bool captured, const char* call);
  // The same for messages, which the ranks number differently: an address if one_device(), or in an own arena.
  Location locate_own(const void* data, std::size_t nbytes) const;
  // How many allocations of the user the peers in other processes have opened.
  std::size_t num_visible_buffers() const { return buffers_ ? buffers_->num_visible() : 0; }
  // From now on locate() finds only arenas; see Separation::kPrivate.
  void hide_user_memory() { user_memory_hidden_ = true; }

  // Allocates memory of the arenas, which the peers see. Null: no room, another arena is needed. Ranks release in
  // different orders, so one may have room where another has none: they must agree before they grow.
  void* allocate(std::size_t nbytes);
  void release(void* data);
  // Adds an arena of at least `nbytes`. Either locally, if one_process():
  void grow(std::size_t nbytes);
  // or collectively: every rank creates an arena, all handles go to every rank, and every rank adds them (world_size
  // handles in rank order). If a rank has handed in zeros, add_arenas throws on all ranks, and the arenas of the others
  // are dropped.
  std::string create_arena(std::size_t nbytes);
  void add_arenas(const std::vector<std::string>& handles);
  std::size_t num_arenas() const;

  // Ends the waits of all ranks, through the host pages of the ranks in this process and the abort flags in all
  // segments; also a connect of this rank. Callable from any thread; does not wait for the device.
  void stop() noexcept;
  // Waits until the flags of a stop() that has returned are in the segments, so that the process may end.
  void await_stop(std::chrono::milliseconds limit) const noexcept;

 private:
  // Memory of one rank that the other ranks of its process use too. It lives as long as any of them.
  struct ProcessMemory {
    std::shared_ptr<DeviceMemory> segment;
    HostPage* page = nullptr;
    HostPage* device_page = nullptr;
    std::mutex mutex;
    std::vector<std::shared_ptr<DeviceMemory>> arenas;
    int device = 0, pid = 0;
    ~ProcessMemory();
    std::shared_ptr<DeviceMemory> find(const Identity& arena);
    void forget(const std::shared_ptr<DeviceMemory>& arena);
  };
  static Registry<Identity, ProcessMemory>& process_memory();  // of this process
  struct Arena {
    std::shared_ptr<DeviceMemory> memory;
    Pieces pieces;
  };
  struct Peer {
    RankHandle handle;
    std::shared_ptr<ProcessMemory> own;                 // in this process
    std::vector<std::shared_ptr<DeviceMemory>> opened;  // in another one: the segment, then arenas
    bool here() const { return own != nullptr; }
  };
  using Mapped = std::vector<std::shared_ptr<DeviceMemory>>;  // by rank

  // peer_memory.cpp
  void allocate_own();
  void write_own_probe();
  char* scratch() const;  // a line of this device's memory
  void add_arena(const Mapped& memories);
  void set_region(int peer, int region, char* base);
  void set_segment(int peer, char* segment);
  void set_entry(std::size_t at, const void* pointer);  // of the table
  void copy(void* target, const void* source, std::size_t nbytes, const char* what) const;
  void free_own() noexcept;
  void close_peers() noexcept;

  // connect.cpp
  void read_handles(const std::vector<std::string>& handles);
  void check_handle(int peer, const RankHandle& mine, const RankHandle& theirs) const;
  void enable_peer_access(int peer) const;
  std::shared_ptr<DeviceMemory> map(int peer, const MemoryHandle& handle, std::int64_t deadline);
  void offer(const DeviceMemory& memory, std::int64_t deadline);
  void read_probe(int peer);
  void write_probe(int peer);
  void check_written(int peer);
  [[noreturn]] void broken_path(int peer, const char* expected) const;
  void find_paths();
  void check_local_ranks() const;
  void check_failures();
  void check_peer(int peer, bool gone, std::int64_t deadline) const;
  void post(int peer, const ControlMessage& message, std::int64_t deadline);
  ControlMessage await(ControlMessage::Kind kind, int peer, std::int64_t deadline, const Identity& subject);
  void barrier(ControlMessage::Kind kind, std::int64_t deadline);
  void send_failure(const Error& error) noexcept;
  std::int64_t deadline() const;

  const int rank_, device_;
  const Layout layout_;
  const std::int64_t timeout_ms_;
  DeviceFacts facts_;
  std::string settings_;
  std::shared_ptr<ProcessMemory> own_;
  std::unique_ptr<ControlSocket> control_;
  Identity own_identity_{}, phase_{};  // phase: what the ranks are agreeing on by messages
  std::vector<Peer> peers_;
  std::atomic<char*> segments_[kMaxRanks] = {};
  std::atomic<bool> stopped_{false}, started_{false};
  char* table_ = nullptr;                  // device memory: the RankTable, then a scratch line
  std::vector<std::atomic<char*>> bases_;  // its regions
  mutable cudaStream_t stream_ = nullptr;  // private, non-blocking
  std::vector<int> local_ranks_;
  std::int8_t ring_order_[kMaxRanks] = {};
  Path::Kind worst_path_ = Path::kUnknown;
  int most_ranks_of_a_device_ = 1;
  std::string identity_;
  const char* call_ = "connect";  // named in errors
  bool failure_known_ = false;    // a peer has sent a failure to all
  bool connected_ = false, one_process_ = false, one_device_ = false, user_memory_hidden_ = false;
  mutable std::mutex arenas_mutex_, peers_mutex_, exchange_mutex_;
  std::vector<Arena> arenas_;
  std::shared_ptr<DeviceMemory> pending_arena_;
  std::unique_ptr<Buffers> buffers_;  // null: not connected, or not needed
};

}  // namespace ringcomm::cuda
