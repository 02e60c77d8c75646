// A peer of the hot calls: who holds and waits for what, in one hash map behind one mutex, looked up at each event. This is
// how a tracer without worker slots is written, and what the artifact of the Atropos paper does. It is treated kindly: the
// kernel's coarse clock, and entries are kept, so that no event allocates.
// SPDX-License-Identifier: MIT OR Apache-2.0
#include "host.h"
#include <functional>
#include <mutex>
#include <thread>
#include <time.h>
#include <unordered_map>

namespace {

struct Key {
  uint64_t task, instance;
  uint32_t resource;
  bool operator==(const Key &o) const { return task == o.task && instance == o.instance && resource == o.resource; }
};

struct Hash {
  size_t operator()(const Key &k) const {
    return std::hash<uint64_t>()(k.task * 31 + k.instance) ^ std::hash<uint64_t>()(k.resource);
  }
};

struct Record {
  uint64_t held_since_ns = 0, amount = 0, wait_since_ns = 0, held_ns = 0, waited_ns = 0;
};

std::mutex guard;
std::unordered_map<Key, Record, Hash> records;

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

void wait(const Key &key) {
  std::lock_guard<std::mutex> lock(guard);
  records[key].wait_since_ns = now_ns();
}

void get(const Key &key) {
  std::lock_guard<std::mutex> lock(guard);
  Record &r = records[key];
  if (r.wait_since_ns) {
    r.waited_ns += now_ns() - r.wait_since_ns;
    r.wait_since_ns = 0;
  }
  if (r.amount++ == 0) r.held_since_ns = now_ns();
}

void free(const Key &key) {
  std::lock_guard<std::mutex> lock(guard);
  Record &r = records[key];
  if (r.amount && --r.amount == 0) r.held_ns += now_ns() - r.held_since_ns;
}

Key mine() { return {std::hash<std::thread::id>()(std::this_thread::get_id()), 7, 1}; }

}  // namespace

void peer_map_get_free(uint64_t n) {
  const Key key = mine();
  for (uint64_t i = 0; i < n; i++) get(key), free(key);
}

void peer_map_wait_get_free(uint64_t n) {
  const Key key = mine();
  for (uint64_t i = 0; i < n; i++) wait(key), get(key), free(key);
}
