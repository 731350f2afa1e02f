// The objects of one kind that ranks of this process find by a key, as long as an object is referenced.
#pragma once

#include <map>
#include <memory>
#include <mutex>

namespace ringcomm {

template <typename Key, typename T>
class Registry {
 public:
  void add(const Key& key, const std::shared_ptr<T>& object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    objects_[key] = object;
  }
  void remove(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    objects_.erase(key);
  }
  // Null: there is none.
  std::shared_ptr<T> find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(key);
    return found == objects_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::weak_ptr<T>> objects_;
};

}  // namespace ringcomm
