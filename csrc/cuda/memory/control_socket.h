// Short messages between the processes of one host, and the file descriptors that go with them. Each rank has a
// datagram socket with a random abstract name, which vanishes with its process. A message stays with its receiver until
// it is asked for, so that ranks may arrive at different times. Only a process that has a rank's handle can write to
// it.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <string>

namespace ringcomm::cuda {

using Identity = std::array<std::uint64_t, 2>;  // random
Identity random_identity();
std::string text_of(const Identity& identity);  // 32 hexadecimal digits
Identity identity_of(const std::string& text);

// A process of this host, distinguished from a later process with the same number.
struct Process {
  int pid = 0;
  std::uint64_t start = 0;  // in clock ticks since the boot

  static Process self();
  bool has_exited() const;
};

struct ControlMessage {
  enum Kind : std::uint32_t {
    kMemory,     // carries a file descriptor: memory `subject`
    kAttached,   // has opened and checked everything that goes by `subject`
    kChecked,    // has found right what others wrote
    kFailed,     // has given up; `code`, `text` say why
    kClosed,     // has let go of everything
    kOffer,      // see Buffers: has memory `subject` to open, as region `code`; `text` is its handle
    kTaken,      // has opened it, before `call`; or cannot, if `code` is not 0
    kWithdrawn,  // does not use it any more from `call` on
    kDropped,    // has closed it
    kCopies,     // see CopyCall: has come to `call`, which copies without a kernel
  };
  Kind kind = kClosed;
  std::int32_t from = -1;  // rank
  std::int32_t code = 0;
  std::uint64_t call = 0;
  Identity subject{};
  std::string text;
  int fd = -1;
};

class ControlSocket {
 public:
  struct Address {
    Identity name{}, secret{};
  };
  enum class SendResult { kSent, kFull, kUnreachable };

  ControlSocket();
  ~ControlSocket();
  ControlSocket(const ControlSocket&) = delete;
  ControlSocket& operator=(const ControlSocket&) = delete;

  const Address& address() const { return address_; }
  // kFull: the receiver has too many unread messages, try again later. kUnreachable: it has closed, or cannot be
  // reached.
  SendResult send(const Address& to, const ControlMessage& message) const noexcept;
  // Receives what arrives within `timeout_ms`; false: nothing did.
  bool receive(int timeout_ms);
  // Takes the oldest message of that kind and sender (any, if negative) that has arrived, with its file descriptor.
  bool take(ControlMessage::Kind kind, int from, const Identity* subject, ControlMessage& message);
  // The same, but only messages whose call is not after `last`.
  bool take(ControlMessage::Kind kind, int from, std::uint64_t last, ControlMessage& message);

 private:
  template <typename Predicate>
  bool take_if(const Predicate& matches, ControlMessage& message);

  int socket_ = -1;
  Address address_;
  std::list<ControlMessage> unread_;
};

}  // namespace ringcomm::cuda
