/*
 * Who blocks whom, and words for what is locked. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Called by the controller only while an overload is suspected. Metadata and row locks are answered from what the
 * sessions have noted themselves (Atm_session), without a latch of the server: two passes over all sessions, one for
 * those who wait and one for the tickets of what is waited for. The lock manager itself could not answer: a lock taken
 * on its fast path is only a counter there, and that is how running statements hold theirs.
 *
 * Waits for a flushed table are asked of the server, the way its deadlock detector does: who still uses the old version
 * stands in the table cache. They are rare, and asked for one step only.
 */
#include "atropos_mysql.h"

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <vector>

#include "sql/mdl.h"
#include "sql/sql_class.h"

static constexpr auto relaxed = std::memory_order_relaxed;
static constexpr auto acquire = std::memory_order_acquire;

/* ---- words ---- */

struct Name {
  uint64_t instance;
  char words[192];
};

static std::mutex names_lock;
static Name names[512];

static Name &name_at(uint64_t instance) { return names[(instance / (ATM_TYPE_MASK + 1)) % std::size(names)]; }

void atm_name_object(uint64_t instance, const char *format, ...) {
  const std::lock_guard<std::mutex> guard(names_lock);
  Name &name = name_at(instance);
  if (name.instance == instance) return;
  va_list args;
  va_start(args, format);
  vsnprintf(name.words, sizeof name.words, format, args);
  va_end(args);
  name.instance = instance;
}

size_t atm_describe(atropos_resource_t resource, uint64_t instance, char *buf, size_t size, void *) {
  int length = 0;
  if (resource == atm_row_lock) {
    if (instance != 0) length = snprintf(buf, size, "rows locked by connection %" PRIu64, instance);
  } else {
    const std::lock_guard<std::mutex> guard(names_lock);
    const Name &name = name_at(instance);
    if (instance != 0 && name.instance == instance) length = snprintf(buf, size, "%s", name.words);
  }
  return length <= 0 ? 0 : std::min<size_t>(length, size > 0 ? size - 1 : 0);
}

/* ---- edges ---- */

namespace {

/* Collects edges; counts those that there is no room for. */
struct Edges {
  atropos_edge *list;
  size_t max, n = 0;

  void add(const Atm_session *waiter, atropos_task_t blocker, atropos_resource_t resource, uint64_t instance,
           uint32_t kind) {
    if (n++ >= max) return;
    list[n - 1] = {waiter->task.load(relaxed), blocker, resource, kind, instance};
  }
};

/* Somebody waits for a metadata lock; somebody holds one that is waited for. */
struct Wait {
  const Atm_session *session;
  atropos_resource_t resource;
  uint64_t instance;
  uint32_t type, conflicts, bars;
};
struct Hold {
  const Atm_session *session;
  uint64_t entry; /* instance | type */
};

uint64_t instance_of(const Wait &w) { return w.instance; }
uint64_t instance_of(const Hold &h) { return h.entry & ~ATM_TYPE_MASK; }

/* The part of a list, sorted by instance, that is of one instance. */
template <typename T>
std::pair<typename std::vector<T>::const_iterator, typename std::vector<T>::const_iterator> of_instance(
    const std::vector<T> &list, uint64_t instance) {
  auto begin = std::lower_bound(list.begin(), list.end(), instance,
                                [](const T &x, uint64_t key) { return instance_of(x) < key; });
  auto end = begin;
  while (end != list.end() && instance_of(*end) == instance) ++end;
  return {begin, end};
}

template <typename T>
void sort_by_instance(std::vector<T> *list) {
  std::sort(list->begin(), list->end(), [](const T &a, const T &b) { return instance_of(a) < instance_of(b); });
}

/* Notes the direct blockers of one session that waits for a table to be closed. */
class Direct_blockers : public MDL_wait_for_graph_visitor {
 public:
  std::vector<MDL_context *> found;

  /* True ends the search: the second node is the first blocker, and what that one waits for is another edge. */
  bool enter_node(MDL_context *) override { return entered_++ > 0; }
  void leave_node(MDL_context *) override {}
  bool inspect_edge(MDL_context *blocker) override {
    found.push_back(blocker);
    return found.size() >= MAX_FOUND;
  }

 private:
  static constexpr size_t MAX_FOUND = 256;
  int entered_ = 0;
};

}  // namespace

static void add_metadata_edges(Edges *edges, std::vector<Wait> *waits) {
  std::vector<Hold> holds;

  sort_by_instance(waits);
  for (const Atm_session *s = atm_sessions; s != nullptr; s = s->next)
    for (const Atm_tickets *t = &s->tickets; t != nullptr; t = t->next.load(acquire))
      for (const auto &noted : t->entries) {
        const uint64_t entry = noted.held.load(acquire);
        if (entry == 0) continue;
        const auto [begin, end] = of_instance(*waits, entry & ~ATM_TYPE_MASK);
        if (begin != end) holds.push_back({s, entry});
      }
  sort_by_instance(&holds);

  for (const Wait &w : *waits) {
    const size_t before = edges->n;
    const auto [hold, hold_end] = of_instance(holds, w.instance);
    for (auto h = hold; h != hold_end; ++h)
      if (h->session != w.session && (w.conflicts >> (h->entry & ATM_TYPE_MASK) & 1) != 0)
        edges->add(w.session, h->session->task.load(relaxed), w.resource, w.instance, ATROPOS_EDGE_HOLDS);
    const auto [wait, wait_end] = of_instance(*waits, w.instance);
    for (auto p = wait; p != wait_end; ++p)
      if (p->session != w.session && (p->bars >> w.type & 1) != 0)
        edges->add(w.session, p->session->task.load(relaxed), w.resource, w.instance, ATROPOS_EDGE_QUEUED);
    /* Somebody has it: from before we looked, or a session that is not followed. */
    if (edges->n == before) edges->add(w.session, 0, w.resource, w.instance, ATROPOS_EDGE_HOLDS);
  }
}

/* The waiter cannot leave its wait meanwhile: its end takes atm_sessions_lock, which we hold. */
static void add_flush_edges(Edges *edges, const Atm_session *waiter) {
  const uint64_t instance = waiter->wait_instance.load(relaxed);
  Direct_blockers blockers;

  waiter->thd->mdl_context.visit_subgraph(&blockers);
  for (MDL_context *blocker : blockers.found) {
    if (blocker == &waiter->thd->mdl_context) continue;
    /* Only compared, for its connection may end now. */
    const THD *thd = blocker->get_owner()->get_thd();
    const Atm_session *s = atm_sessions;
    while (s != nullptr && s->thd != thd) s = s->next;
    edges->add(waiter, s != nullptr ? s->task.load(relaxed) : 0, atm_table_flush, instance, ATROPOS_EDGE_HOLDS);
  }
}

/* `rows` are the sessions that wait for rows. A waiter that has its row already but has not run since still looks as
   if it waited; by then the blocker may run something innocent. Its epoch tells: the same as when it blocked, so it
   has not given up its locks since. */
static void add_row_edges(Edges *edges, const std::vector<const Atm_session *> &rows) {
  using Named = std::pair<uint64_t, const Atm_session *>;
  std::vector<Named> by_id;

  if (rows.empty()) return;
  for (const Atm_session *s = atm_sessions; s != nullptr; s = s->next) by_id.emplace_back(s->id, s);
  std::sort(by_id.begin(), by_id.end());
  for (const Atm_session *waiter : rows) {
    const uint64_t id = waiter->row_blocker_id.load(acquire), epoch = waiter->row_blocker_epoch.load(relaxed);
    const auto found = std::lower_bound(by_id.begin(), by_id.end(), Named{id, nullptr});
    const Atm_session *b = id != 0 && found != by_id.end() && found->first == id ? found->second : nullptr;
    const bool blocks = b != nullptr && b->row_epoch.load(acquire) == epoch;
    edges->add(waiter, blocks ? b->task.load(relaxed) : 0, atm_row_lock, id, ATROPOS_EDGE_HOLDS);
  }
}

size_t atm_edges(atropos_edge *list, size_t max, void *) try {
  Edges edges{list, max};
  std::vector<Wait> waits;
  std::vector<const Atm_session *> rows;
  const std::lock_guard<std::mutex> guard(atm_sessions_lock);

  for (const Atm_session *s = atm_sessions; s != nullptr; s = s->next) {
    switch (s->wait.load(acquire)) {
      case ATM_WAIT_METADATA:
        waits.push_back({s, s->wait_resource.load(relaxed), s->wait_instance.load(relaxed), s->wait_type.load(relaxed),
                         s->wait_conflicts.load(relaxed), s->wait_bars.load(relaxed)});
        break;
      case ATM_WAIT_FLUSH:
        add_flush_edges(&edges, s);
        break;
      case ATM_WAIT_ROW:
        rows.push_back(s);
        break;
      default:
        break;
    }
  }
  add_row_edges(&edges, rows);
  add_metadata_edges(&edges, &waits);
  return edges.n;
} catch (const std::bad_alloc &) {
  return 0; /* without edges the library infers from what is held */
}
